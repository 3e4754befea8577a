-- Whether an id is known with another request. `known` is the digest that its ledger has, which is
-- missing where nobody gave one; '' is not compared.
local function is_reused(known, digest)
  return digest ~= '' and (known or '') ~= '' and known ~= digest
end

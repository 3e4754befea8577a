-- What the parameters of an untrusted request ask for: its model, and the tokens that it may generate in
-- all its choices; nil for as many as the model allows. `fields` has `model` and `params` (JSON).
local function asked_of(fields)
  local USUAL = 16 -- where `params` has none
  local is_read, params = pcall(cjson.decode, fields['params'] or '{}')
  if not is_read or type(params) ~= 'table' then params = {} end
  local function count(value, default)
    return type(value) == 'number' and value >= 1 and math.floor(value) or default
  end
  local most = params['max_tokens']
  if most ~= cjson.null then most = count(most, USUAL) else most = nil end
  return {model = fields['model'] or '', most = most, choices = count(params['n'], 1)}
end

-- Fields of an entry that goes from a lane back to the intake: the request, its history from the
-- ledger, its published tokens, and the base model of the worker that had it ('': not known). `epoch`
-- is the generation epoch of the first token, if one was set, and `choices` has the choice of each, a
-- byte each, if there are several.
local function back_fields(fields, ledger, tokens, choices, model)
  local NAMES = {'crashes', 'suspected', 'crashed_alone', 'lost_alone', 'faults', 'reason',
    'not_before', 'epoch', 'trial', 'relapsed'}
  local MOST_BYTES = 2000
  local values = redis.call('HMGET', ledger, unpack(NAMES))
  local published, out = redis.call('GET', tokens), {}
  -- Without tokens they are of another life of that id.
  local history = {published = published, choices = published and redis.call('GET', choices),
    base_model = model ~= '' and model}
  -- A client may have written anything there, and as much as it likes.
  for i, name in ipairs(NAMES) do history[name] = values[i] and values[i]:sub(1, MOST_BYTES) end
  for i = 1, #fields, 2 do
    if history[fields[i]] == nil then
      out[#out + 1] = fields[i]
      out[#out + 1] = fields[i + 1]
    end
  end
  for name, value in pairs(history) do
    if value then
      out[#out + 1] = name
      out[#out + 1] = value
    end
  end
  return out
end

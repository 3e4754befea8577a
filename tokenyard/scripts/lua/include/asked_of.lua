-- What the parameters of an untrusted request ask for: its model, and the tokens that it may generate in
-- all its choices; nil for as many as the model allows. `fields` has `model`, `task` and `params` (JSON), `info` is
-- the key with what the models file sets for requests that do not say it.
local function asked_of(fields, info)
  local USUAL = 16 -- where neither says it
  if (fields['task'] or 'generate') ~= 'generate' then
    return {model = fields['model'] or '', most = 0, choices = 1}
  end
  local is_read, params = pcall(cjson.decode, fields['params'] or '{}')
  if not is_read or type(params) ~= 'table' then params = {} end
  local model, own = fields['model'] or '', {}
  if params['max_tokens'] == nil or params['n'] == nil then
    local known = redis.call('HMGET', info, 'defaults', 'default_model')
    local all
    is_read, all = pcall(cjson.decode, known[1] or '{}')
    own = is_read and type(all) == 'table' and all[model ~= '' and model or known[2] or '']
    if type(own) ~= 'table' then own = {} end
  end
  local function count(value, default)
    return type(value) == 'number' and value >= 1 and math.floor(value) or default
  end
  local most = params['max_tokens']
  if most ~= cjson.null then most = count(most, count(own['max_tokens'], USUAL)) else most = nil end
  return {model = model, most = most, choices = count(params['n'], count(own['n'], 1))}
end

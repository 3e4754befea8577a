-- The estimated tokens of a waiting request: `submit` adds them to the yard's sum, and they are
-- subtracted again, by what stands in its entry. Four bytes of text count as a token. With the messages
-- of a chat counts what else its template is given; all of these may stand among the common fields.
local queued_tokens_of
do
  local PROMPTS = {'tokens', 'prompt', 'messages', 'inputs'}
  local OF_CHATS = {'tools', 'documents', 'chat_template_kwargs'}
  local IS_OF_CHATS = {tools = true, documents = true, chat_template_kwargs = true}
  -- The last common fields with and without any of these, which a burst has in each of its requests.
  local read, named, plain = '', {}, nil

  local function common_fields(common)
    if common == read then return named end
    local is_read, fields = pcall(cjson.decode, common)
    read, named = common, {}
    if not is_read or type(fields) ~= 'table' then return named end
    for name, value in pairs(fields) do
      if type(value) == 'string' then named[name] = value end
    end
    return named
  end

  local function is_plain(common)
    if common == plain then return true end
    if common:find('\\u', 1, true) then return false end -- an escape may hide a name
    for _, name in ipairs(OF_CHATS) do
      if common:find('"' .. name .. '"', 1, true) then return false end
    end
    plain = common
    return true
  end

  local function size_of(fields)
    local own = {}
    for i = 1, #fields, 2 do own[fields[i]] = fields[i + 1] end
    local common = own.common and common_fields(own.common) or {}
    for _, name in ipairs(PROMPTS) do
      local prompt = own[name] or common[name]
      local size = prompt and #prompt
      if size and name == 'messages' then
        for _, other in ipairs(OF_CHATS) do size = size + #(own[other] or common[other] or '') end
      end
      if size then return math.max(1, math.floor(size / 4)) end
    end
    return 0
  end

  queued_tokens_of = function(fields)
    local size, common, has_more
    for i = 1, #fields, 2 do
      local name = fields[i]
      if name == 'tokens' or name == 'prompt' or name == 'inputs' then
        return math.max(1, math.floor(#fields[i + 1] / 4))
      elseif name == 'messages' then
        size = #fields[i + 1]
      elseif name == 'common' then
        common = fields[i + 1]
      elseif IS_OF_CHATS[name] then
        has_more = true
      end
    end
    if size and not has_more and (not common or is_plain(common)) then
      return math.max(1, math.floor(size / 4))
    end
    return size_of(fields)
  end
end

-- How the keys of a yard begin, by any of them.
local function prefix_of(key)
  return key:match('^tokenyard:{[^}]*}:')
end

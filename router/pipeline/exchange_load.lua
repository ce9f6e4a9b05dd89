-- KEYS: a hash of each router's report, by its id; under '': since when routers are known, and when one last reported.
-- ARGV: id, until when the router waits for the answer, LIFE_S, TURN_S, and its report as JSON: by replica the slots taken,
-- prompt, output and cache tokens, for how long it is spared, slots taken and wanted, the present share, the limit.
-- Stored of that: the first four, until when it is spared, slots taken and wanted, and the slots that count as the router's:
-- the maximum of those taken, its old share and its new one. Returns Redis' time, and as JSON whether every router is known,
-- and by replica: share, routers, the others' load, for how long they spare it.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
if now > tonumber(ARGV[2]) then return {tostring(now), ''} end
local me, life, turn = ARGV[1], tonumber(ARGV[3]), math.floor(now / tonumber(ARGV[4]))

local since, last, others = now, now, {}
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  local id, entry = flat[i], cjson.decode(flat[i + 1])
  if id == '' then
    since, last = entry[1], entry[2]
  elseif id ~= me then
    if entry.at > now then  -- the clock was set back
      entry.at = now
      redis.call('HSET', KEYS[1], id, cjson.encode(entry))
    end
    if now - entry.at > life then redis.call('HDEL', KEYS[1], id) else others[id] = entry.replicas end
  end
end
if last - now > 0.001 or now - last > life / 2 then since = now end
local settled = now - since >= life

local function part(wants, limit)
  local wanted, left, given = 0, limit, {}
  for _, want in ipairs(wants) do wanted = wanted + want[2] end
  local short = wanted > limit
  table.sort(wants, function(a, b)
    if a[2] == b[2] then return a[1] < b[1] end
    return (a[2] < b[2]) == short
  end)
  local i = 1
  while i <= #wants do  -- those who need less than an equal part; where there is enough, those who need more
    local even = left / (#wants - i + 1)
    if (short and wants[i][2] > even) or (not short and wants[i][2] < even) then break end
    given[wants[i][1]], left, i = wants[i][2], left - wants[i][2], i + 1
  end
  local rest = {}
  for k = i, #wants do rest[#rest + 1] = wants[k][1] end
  table.sort(rest)
  for k, id in ipairs(rest) do
    local odd = (k + turn) % #rest < left % #rest
    given[id] = math.floor(left / #rest) + (odd and 1 or 0)
  end
  return given[me]
end

local kept, told = {}, {}
for url, own in pairs(cjson.decode(ARGV[5])) do
  local wants, sums, held, spared = {{me, own[6]}}, {0, 0, 0, 0}, 0, 0
  for id, replicas in pairs(others) do
    local theirs = replicas[url]
    if theirs then
      wants[#wants + 1] = {id, theirs[6]}
      for k = 1, 4 do sums[k] = sums[k] + theirs[k] end
      spared, held = math.max(spared, theirs[5] - now), held + theirs[7]
    end
  end
  local share = part(wants, own[8])
  if not settled then  -- nobody may rise, so nobody falls below an equal part, and is kept there
    share = math.min(own[7], math.max(share, math.floor(own[8] / #wants)))
  elseif share > own[7] then
    share = math.max(own[7], math.min(share, own[8] - held))
  end
  kept[url] = {own[1], own[2], own[3], own[4], own[5] > 0 and now + own[5] or 0, own[6], math.max(own[1], own[7], share)}
  told[url] = {share, #wants, sums[1], sums[2], sums[3], sums[4], spared}
end
redis.call('HSET', KEYS[1], me, cjson.encode({at = now, replicas = kept}), '', cjson.encode({since, now}))
redis.call('EXPIRE', KEYS[1], 60)
return {tostring(now), cjson.encode({settled, told})}

-- Before budget_reserve.lua and budget_settle.lua. What an account has spent in a period is in a hash: what was counted
-- there (engine_us, money_u), what a lost hash is known to have had (base_engine_us, base_money_u), and a random name (ledger).
-- A router says what it last saw: the name of the hash, engine and money. If the hash is another one, what it saw is lost
-- and comes back as the base; if it is the same one and has less, it is an old copy. Since of several routers that tell it
-- the one that saw most counts, and what is counted anew is apart, nothing is added twice.
local function spent_of(name, made, seen, seen_engine, seen_money, expiry)
  local got = redis.call('HMGET', name, 'engine_us', 'money_u', 'base_engine_us', 'base_money_u', 'ledger')
  local ledger = got[5]
  local function total(field, counted, base, lost)
    counted, base, lost = tonumber(counted or 0), tonumber(base or 0), tonumber(lost)
    local least = lost
    if ledger == seen then least = lost - counted end
    if least > base then
      base = least
      redis.call('HSET', name, field, string.format('%.0f', base))
    end
    return counted + base
  end
  local engine = total('base_engine_us', got[1], got[3], seen_engine)
  local money = total('base_money_u', got[2], got[4], seen_money)
  if not ledger and redis.call('EXISTS', name) == 1 then
    ledger = made
    redis.call('HSET', name, 'ledger', ledger)
    redis.call('EXPIRE', name, expiry)
  end
  return engine, money, ledger or ''
end

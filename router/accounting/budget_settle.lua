-- KEYS: the settlement's mark, for each account as of budget_reserve.lua, then marks that nobody needs any more.
-- ARGV: id, engine and money used, for how long the mark is kept, a new random name, for how long a day's and a month's
-- costs are kept, the number of accounts, then for each account what was last seen of the day and of the month: name,
-- engine, money. Answers for each account what was spent of both: name, engine, money.
local engine, money, accounts = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[8])
for n = 2 + 4 * accounts, #KEYS do redis.call('DEL', KEYS[n]) end
local first = redis.call('SET', KEYS[1], '', 'NX', 'EX', ARGV[4])
local answer = {}
for n = 0, accounts - 1 do
  redis.call('HDEL', KEYS[4 + 4 * n], ARGV[1])
  redis.call('ZREM', KEYS[5 + 4 * n], ARGV[1])
  for which = 0, 1 do
    local spent, seen = KEYS[2 + 4 * n + which], 8 + 6 * n + 3 * which
    local e, m, ledger = spent_of(spent, ARGV[5], ARGV[seen + 1], ARGV[seen + 2], ARGV[seen + 3], ARGV[6 + which])
    if first and (engine > 0 or money > 0) then
      if ledger == '' then
        ledger = ARGV[5]
        redis.call('HSET', spent, 'ledger', ledger)
      end
      redis.call('HINCRBY', spent, 'engine_us', ARGV[2])
      redis.call('HINCRBY', spent, 'money_u', ARGV[3])
      redis.call('EXPIRE', spent, ARGV[6 + which])
      e, m = e + engine, m + money
    end
    answer[#answer + 1] = ledger
    answer[#answer + 1] = string.format('%.0f', e)
    answer[#answer + 1] = string.format('%.0f', m)
  end
end
return answer

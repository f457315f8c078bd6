"""The server-side scripts: taking over a job's stream, writing to it behind the fence, handing it back.

`meta` is a hash: epoch, writer (a nonce of the attempt), origin, digest, next_seq, ended, fruitless (attempts in a row
that were begun and brought not one delta).
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum


@dataclass(frozen=True, slots=True)
class Script:
    source: bytes
    sha: bytes

    @classmethod
    def of(cls, source: str) -> "Script":
        encoded = source.strip().encode()
        return cls(encoded, hashlib.sha1(encoded, usedforsecurity=False).hexdigest().encode())


class AppendReply(IntEnum):
    FENCED = 0
    WRITTEN = 1
    WRITTEN_AFTER_LOSS = 2
    """Redis has forgotten events that it had acknowledged; readers see a gap."""


# KEYS meta, cancel; ARGV origin, digest, writer, ttl in ms.
# Reply: outcome, epoch, same digest, ended status, cancelled, fruitless attempts with this one.
OPEN = Script.of("""
local held = redis.call('HMGET', KEYS[1], 'epoch', 'origin', 'digest', 'ended')
local cancelled = redis.call('EXISTS', KEYS[2])
if held[1] then
  local same_digest = held[3] == ARGV[2]
  local flag = same_digest and 1 or 0
  if held[2] ~= ARGV[1] or not same_digest then
    return {'duplicate', tonumber(held[1]), flag, held[4] or '', cancelled, 0}
  end
  if held[4] then
    return {'ended', tonumber(held[1]), flag, held[4], cancelled, 0}
  end
end
local epoch = redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HSET', KEYS[1], 'origin', ARGV[1], 'digest', ARGV[2], 'writer', ARGV[3], 'next_seq', 0)
local fruitless = redis.call('HINCRBY', KEYS[1], 'fruitless', 1)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {'opened', epoch, 1, '', cancelled, fruitless}
""")

# KEYS meta; ARGV epoch, writer. An attempt that is handed back in good order does not count as fruitless.
HAND_BACK = Script.of("""
local held = redis.call('HMGET', KEYS[1], 'epoch', 'writer', 'fruitless')
if held[1] == ARGV[1] and held[2] == ARGV[2] and tonumber(held[3] or 0) > 0 then
  redis.call('HINCRBY', KEYS[1], 'fruitless', -1)
end
return 1
""")

# The higher epoch wins; of two writers with one epoch (possible only after Redis lost its memory) the one
# that meta names wins. A meta of a lower epoch, or none, is what a Redis that forgot looks like: the writer
# creates it again. Events below next_seq are in the log already: sending again changes nothing.
FENCE = """
local held_epoch = tonumber(held[1] or -1)
local epoch = tonumber(ARGV[1])
if held_epoch > epoch or (held_epoch == epoch and held[2] ~= ARGV[2]) then
  return 0
end
"""

# KEYS meta, log; ARGV epoch, writer, ttl in ms, maximal log length, live channel, origin, digest, ended
# status or empty, seq of the first event, events ….
_APPEND = """
local held = redis.call('HMGET', KEYS[1], 'epoch', 'writer', 'next_seq')
%(fence)s
local first = tonumber(ARGV[9])
local next_seq = tonumber(held[3] or 0)
local reply = 1
if held_epoch < epoch then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'writer', ARGV[2], 'origin', ARGV[6], 'digest', ARGV[7])
  next_seq = first
  reply = first > 0 and 2 or 1
elseif next_seq < first then
  next_seq = first
  reply = 2
end
local stop = first + #ARGV - 9
if next_seq < stop then
  for i = 10 + next_seq - first, #ARGV do
    redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'event', ARGV[i])
    redis.call('PUBLISH', ARGV[5], ARGV[i])
  end
  next_seq = stop
end
if stop > 1 then
  redis.call('HSET', KEYS[1], 'next_seq', next_seq, 'fruitless', 0)
else
  redis.call('HSET', KEYS[1], 'next_seq', next_seq)
end
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[1], 'ended', ARGV[8])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return reply
"""


def append_script(fence: str = FENCE) -> Script:
    """Tests pass a fence that never closes, to show what it is for."""
    return Script.of(_APPEND % {"fence": fence})


APPEND = append_script()

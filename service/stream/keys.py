"""The names of keys and channels in Redis, and the server-side scripts that change them.

Every name begins with the namespace, which one deployment owns (decision 0012). The braces make all keys of one job
share a cluster slot. `meta` is a hash:

    epoch         of the attempt that holds the stream: microseconds of the server's clock at its opening, always
                  above the one before. It never comes again, even after the server lost its memory, and two
                  databases never have the same one for a job.
    writer        a nonce of that attempt
    origin, digest, deployment
                  the record that owns the id, its bytes, and who ran it
    attempts, attempts_without_progress
                  how often the record was begun; how often in a row without one delta
    began_ms      server's clock at the first attempt
    next_seq      of the log, within the epoch
    decided       the terminal record while it is on its way to Kafka
    ended         the status, once that record is durable
    accepted      present once the scheduler has queued the job: it will not be refused any more
    refused       present when the record is being, or was, refused: the id is free for another record
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum

from service.stream.connection import pack_args
from service.stream.stream_config import StreamConfig

EVENT_FIELD = "event"


@dataclass(frozen=True, slots=True)
class JobKeys:
    log: str
    live: str
    """A channel, not a key."""
    meta: str
    cancel: str

    @classmethod
    def of(cls, job_id: str, namespace: str) -> "JobKeys":
        base = f"{namespace}:{{{job_id}}}"
        return cls(f"{base}:log", f"{base}:live", f"{base}:meta", f"{base}:cancel")


def control_channel(namespace: str) -> str:
    """Where ids of jobs to cancel are published; all databases of one Redis hear it."""
    return f"{namespace}:control"


def deployment_key(namespace: str) -> str:
    """Names the deployment that owns the namespace, for as long as one of its workers lives."""
    return f"{namespace}:deployment"


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
    """Redis had forgotten the job, or events that it had acknowledged: readers may see a gap."""


# KEYS deployment; ARGV identity, ttl in ms. Reply: empty when it is ours now, else who holds it; the server's clock in
# seconds and microseconds.
CLAIM = Script.of("""
local held = redis.call('GET', KEYS[1])
local time = redis.call('TIME')
if held and held ~= ARGV[1] then
  return {held, time[1], time[2]}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'', time[1], time[2]}
""")

# KEYS meta, cancel, log; ARGV origin, digest, writer, ttl in ms, deployment, whether it is to be refused (1 or 0).
# Reply: outcome, epoch, same digest, ended status, cancelled, attempts without progress (this one included),
# attempts, began_ms, decided record.
# The id belongs to the first record that has it, except when that one was refused, or has ended, or was left, in
# another deployment: that one is gone, since this one holds the namespace. Sent twice by one caller (after a lost
# reply) it counts once. The first sending may come late, even after this attempt's first events: it changes nothing.
OPEN = Script.of("""
local held = redis.call('HMGET', KEYS[1], 'epoch', 'origin', 'digest', 'ended', 'refused', 'deployment', 'writer',
  'attempts', 'attempts_without_progress', 'began_ms', 'decided', 'accepted')
for _, i in ipairs({1, 8, 9, 10}) do
  local number = tonumber(held[i] or 0)
  if not number or number ~= math.floor(number) or not (number >= 0 and number < 9007199254740991) then
    return redis.error_reply('WRONGTYPE a number of the job is none')
  end
end
local cancelled = redis.call('EXISTS', KEYS[2])
local epoch = 0
if held[1] then
  epoch = tonumber(held[1])
  local same_digest = held[3] == ARGV[2]
  local same_record = same_digest and held[2] == ARGV[1]
  local elsewhere = held[6] and held[6] ~= ARGV[5]
  if (not same_record and (held[5] or elsewhere)) or (held[4] and elsewhere) then
    redis.call('DEL', KEYS[1], KEYS[3])
    held = {}
  elseif not same_record then
    local fate = held[4] or held[12] and 'accepted' or ''
    return {'duplicate', epoch, same_digest and 1 or 0, fate, cancelled, 0, 0, 0, ''}
  elseif held[4] then
    return {'ended', epoch, 1, held[4], cancelled, 0, 0, 0, ''}
  end
end
local time = redis.call('TIME')
local began_ms = tonumber(held[10] or time[1] * 1000 + math.floor(time[2] / 1000))
local attempts, idle = tonumber(held[8] or 0), tonumber(held[9] or 0)
if held[7] ~= ARGV[3] then
  epoch = math.max(epoch + 1, time[1] * 1000000 + time[2])
  attempts, idle = attempts + 1, idle + 1
  redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', epoch), 'origin', ARGV[1], 'digest', ARGV[2],
    'writer', ARGV[3], 'deployment', ARGV[5], 'next_seq', 0, 'attempts', attempts,
    'attempts_without_progress', idle, 'began_ms', string.format('%.0f', began_ms))
end
if ARGV[6] == '1' then
  redis.call('HSET', KEYS[1], 'refused', 1)
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return {'opened', epoch, 1, '', cancelled, idle, attempts, began_ms, held[11] or ''}
""")

# KEYS meta; ARGV epoch, writer. An attempt that is handed back in good order does not count as one without progress.
HAND_BACK = Script.of("""
local held = redis.call('HMGET', KEYS[1], 'epoch', 'writer', 'attempts_without_progress')
if held[1] == ARGV[1] and held[2] == ARGV[2] and tonumber(held[3] or 0) > 0 then
  redis.call('HINCRBY', KEYS[1], 'attempts_without_progress', -1)
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

# KEYS meta, log; ARGV epoch, writer, ttl in ms, maximal log length, live channel, origin, digest, deployment,
# attempt, decided record or empty, ended status or empty, `accepted` or `refused` or empty, seq of the first event,
# events …. Without events it keeps what is there alive. What was done before a command is refused stays done, so
# each event is counted as soon as it is in the log: sent again, it is not written twice.
_APPEND = """
local held = redis.call('HMGET', KEYS[1], 'epoch', 'writer', 'next_seq')
%(fence)s
local first = tonumber(ARGV[13])
local next_seq = tonumber(held[3] or 0)
local reply = 1
if held_epoch < epoch then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'writer', ARGV[2], 'origin', ARGV[6], 'digest', ARGV[7],
    'deployment', ARGV[8], 'attempts', ARGV[9])
  next_seq = first
  reply = 2
elseif next_seq < first then
  next_seq = first
  reply = 2
end
local stop = first + #ARGV - 13
local failure = nil
if next_seq < stop then
  for i = 14 + next_seq - first, #ARGV do
    local added = redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'event', ARGV[i])
    if type(added) == 'table' then
      redis.call('HSET', KEYS[1], 'next_seq', next_seq)
      return added
    end
    next_seq = next_seq + 1
    local told = redis.pcall('PUBLISH', ARGV[5], ARGV[i])
    if type(told) == 'table' then
      failure = told
    end
  end
end
if stop > 1 then
  redis.call('HSET', KEYS[1], 'next_seq', next_seq, 'attempts_without_progress', 0)
else
  redis.call('HSET', KEYS[1], 'next_seq', next_seq)
end
if ARGV[10] ~= '' then
  redis.call('HSET', KEYS[1], 'decided', ARGV[10])
end
if ARGV[11] ~= '' then
  redis.call('HSET', KEYS[1], 'ended', ARGV[11])
  redis.call('HDEL', KEYS[1], 'decided')
end
if ARGV[12] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[12], 1)
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return failure or reply
"""


def append_script(fence: str = FENCE) -> Script:
    """Tests pass a fence that never closes, to show what it is for."""
    return Script.of(_APPEND % {"fence": fence})


APPEND = append_script()


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt writes; what the fence compares."""

    job_id: str
    epoch: int
    writer: str
    """A nonce: tells apart two attempts that got one epoch from a Redis that lost its memory and whose clock was set
    back."""
    origin: str
    fingerprint: str
    streamed: bool
    number: int = 1
    """How often the record was begun, this time included."""
    deployment: str = ""
    worker: str = ""


NUM_PREFIX = 14
"""EVALSHA, its hash, the number of keys, two keys and the nine arguments that stay the same."""


def append_prefix(attempt: Attempt, config: StreamConfig, script: Script) -> bytes:
    """What every call of the append script for one attempt begins with, packed."""
    keys = JobKeys.of(attempt.job_id, config.namespace)
    constant = (
        "EVALSHA", script.sha, 2, keys.meta, keys.log,
        attempt.epoch, attempt.writer, config.stream_ttl_s * 1000, config.stream_max_events, keys.live,
        attempt.origin, attempt.fingerprint, attempt.deployment, attempt.number,
    )  # fmt: skip
    return pack_args([arg if isinstance(arg, bytes) else str(arg).encode() for arg in constant])

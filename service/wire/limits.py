"""Limits of each part of a message, with the arithmetic behind them."""

from typing import Final

WIRE_VERSION: Final = 1

# A broker's default `message.max.bytes` is 1,048,588: 1 MiB and the record's own overhead. A larger record
# reaches us only where the operator raised that, and one record must not hold the intake for long: 1 MiB
# parses in about 2 ms.
MAX_RECORD_BYTES: Final = 1 << 20

MAX_INTEGER: Final = (1 << 63) - 1
"""Of counts in events and results. Offsets of Kafka and epochs are of 64 bits, and orjson writes no larger integer."""

# Long enough for two UUIDs and a prefix (2 × 36 + 56); short enough for Redis keys and log lines.
MAX_ID_CHARS: Final = 128
ID_PATTERN: Final = rf"^[A-Za-z0-9._:-]{{1,{MAX_ID_CHARS}}}$"
MAX_CUSTOM_ID_CHARS: Final = 512
"""What OpenAI's batches allow; any characters."""
MAX_MODEL_CHARS: Final = 256
MAX_TENANT_CHARS: Final = 128
MAX_NAME_CHARS: Final = 64

# 1,024 messages of 1 KiB fill a record; a part is a paragraph of one message.
MAX_MESSAGES: Final = 1024
MAX_CONTENT_PARTS: Final = 256

# An id needs at least 2 bytes of JSON ("7,"), so a record of 1 MiB could carry 524,288. Half of that is twice
# the longest context of the models served (131,072).
MAX_PROMPT_TOKENS: Final = 1 << 18
MAX_TOKEN_ID: Final = (1 << 31) - 1
"""Token ids are int32 on the device."""
MAX_NEW_TOKENS: Final = 1 << 18

MAX_TEMPERATURE: Final = 2.0
MAX_TOP_K: Final = 1 << 20
"""Above every vocabulary (the largest known has 262,144 entries): more would mean the same as 0."""
MAX_PENALTY: Final = 2.0
# Logits are divided by it in float32: a hundredfold is beyond any use, 1e-38 would make them infinite.
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 2.0
MIN_SEED: Final = -(1 << 63)
MAX_SEED: Final = (1 << 63) - 1

# The matcher of stop strings has at most 16 × 256 + 1 = 4,097 states; at most 256 characters are held back.
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256

MAX_LOGIT_BIAS_ENTRIES: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0

# Per output token 20 alternatives of about 60 bytes: 1.2 KiB, against about 150 bytes without.
MAX_TOP_LOGPROBS: Final = 20
MAX_CHOICES: Final = 16

MAX_SCHEMA_BYTES: Final = 64 << 10
MAX_REGEX_CHARS: Final = 4096
MAX_CHOICE_OPTIONS: Final = 256
MAX_CHOICE_CHARS: Final = 256

# Seconds: 30 days, four times the jobs topic's default retention of a week.
MAX_DEADLINE_S: Final = 30 * 24 * 3600.0
MAX_TARGET_MS: Final = 24 * 3600 * 1000.0

# Milliseconds since 1970. A timestamp outside 2001–2099 is in another unit or was never set (0, -1).
MIN_TIMESTAMP_MS: Final = 1_000_000_000_000
MAX_TIMESTAMP_MS: Final = 4_102_444_800_000

MAX_METADATA_BYTES: Final = 4096
# orjson writes at most 254 levels and reads 1,024: what is echoed has to stay well under the first.
MAX_DEPTH: Final = 32

# Twice what the widest object (a job, 29 fields) has. Each unknown field is an error of its own, and a record of
# 1 MiB has room for 100,000 of them.
MAX_FIELDS: Final = 64

# What an error repeats of an offending value, and the longest message: enough to find the place, too little
# to carry a document into the logs.
MAX_SHOWN_CHARS: Final = 64
MAX_ERROR_MESSAGE_BYTES: Final = 1024

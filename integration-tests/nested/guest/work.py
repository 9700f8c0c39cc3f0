"""One round of a guest's computing: builds a table of words, sorts it, and checks the result."""

import sys

SIZE = 4000
seed = int(sys.argv[1])
table = {}
for n in range(SIZE):
    seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
    table[f"{seed:016x}"] = n
words = sorted(table)
assert len(words) == SIZE
assert all(a < b for a, b in zip(words, words[1:]))
assert sum(table[word] for word in words) == SIZE * (SIZE - 1) // 2

"""Compares the verdicts of kosoku with those that are expected: INDEX.json EXPECTED WAY COUNT, of that many cases."""

import fnmatch
import json
import sys


def main():
    index, expected, way, count = sys.argv[1:]
    with open(index, encoding="utf-8") as file:
        (verdicts,) = json.load(file).values()
    with open(expected, encoding="utf-8") as file:
        rows = [line.split() for line in file if line.strip() and not line.startswith("#")]
    rules = [row for row in rows if len(row) == 3 or row[3] == way]
    wrong = 0
    for case, verdict in verdicts.items():
        found = (verdict["behavior"], verdict["behaviorClose"])
        behavior, closing = next((row[1:3] for row in rules if fnmatch.fnmatchcase(case, row[0])), ("OK", "OK"))
        if found[0] not in behavior.split("|") or found[1] != closing:
            wrong += 1
            print(f"case {case}: {' '.join(found)} instead of {behavior} {closing}", file=sys.stderr)
    print(f"{len(verdicts) - wrong} of {len(verdicts)} cases as expected")
    if len(verdicts) != int(count):
        print(f"{len(verdicts)} cases ran instead of {count}", file=sys.stderr)
        wrong += 1
    sys.exit(wrong > 0)


main()

"""Compares the verdicts of kosoku with those that are expected: INDEX.json EXPECTED [--limits | --write].

A line of EXPECTED names cases (a group with `*`, or one), and what they come to beside OK: `6.4.* NON-STRICT`. The first line that
fits counts; what no line names is OK. Closing has to be OK everywhere, or INFORMATIONAL where its line says so behind a comma.
"""

import fnmatch
import json
import sys


def main():
    index, expected, *options = sys.argv[1:]
    with open(index, encoding="utf-8") as file:
        (verdicts,) = json.load(file).values()
    verdicts = {case: f"{v['behavior']},{v['behaviorClose']}" for case, v in verdicts.items()}
    with open(expected, encoding="utf-8") as file:
        rows = [line.split("#")[0].split() for line in file]
    rules, count = [row for row in rows if len(row) == 2 and row[0] != "cases"], dict(r for r in rows if len(r) == 2 and r[0] == "cases")
    wrong = 0
    for case, verdict in verdicts.items():
        rule = next((to for pattern, to in rules if fnmatch.fnmatchcase(case, pattern)), "OK")
        wanted = rule if "," in rule else f"{rule},OK"
        if verdict != wanted:
            wrong += 1
            print(f"case {case}: {verdict} instead of {wanted}", file=sys.stderr)
    ran = sum(1 for case in verdicts if not case.startswith("9."))
    if ran != int(count["cases"]) or ("--limits" in options) != (ran < len(verdicts)):
        wrong += 1
        print(f"{ran} cases beside group 9, and {len(verdicts) - ran} of it", file=sys.stderr)
    print(f"{len(verdicts) - wrong} of {len(verdicts)} cases as expected")
    sys.exit(wrong > 0)


main()

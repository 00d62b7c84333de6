"""The HTTP reference of the book: its tables are made from the types of the answers in the code.

A table stands between two comments: `<!-- fields: FILE TYPE -->` and `<!-- end -->`. Everything else on the page is written by
hand.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/book/src/http.md"
# The heading of a server's part of the page, and the file that names its paths.
SERVERS = {"A node": "node/src/http.rs", "The coordinator": "coordinator/src/http.rs"}

TABLE = re.compile(r"<!-- fields: (\S+) (\w+) -->\n(.*?)<!-- end -->", re.S)
ROUTE = re.compile(r'\.route\("([^"]+)", (get|post)\(\)')
FIELD = re.compile(r"(?:pub(?:\(\w+\))? )?(\w+): (.+),")
PLAIN = {
    "bool": "true or false",
    "f64": "number",
    "PathBuf": "text",
    "SocketAddr": "`IP:PORT`",
    "String": "text",
    "&str": "text",
} | {kind: "whole number" for kind in ["u8", "u16", "u32", "u64", "usize"]}
# Attributes of a field or type that change no name.
HARMLESS = {"default", "deny_unknown_fields", 'skip_serializing_if = "Vec::is_empty"'}


@dataclass
class Field:
    name: str
    kind: str
    meaning: str


def problems(page):
    """The parts of the code that the page lacks, and those that it has too many of."""
    found = [] if page == written(page) else ["http.md is not what the types say: run `tests/book.py write`"]
    for heading, file in SERVERS.items():
        part = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        served = {f"{method.upper()} {path}" for path, method in ROUTE.findall((ROOT / file).read_text())}
        named = set(re.findall(r"^### `(\w+ /\S*)`$", part, re.M))
        found += [f"http.md does not describe `{route}` of {file}" for route in sorted(served - named)]
        found += [f"http.md describes `{route}`, which is not in {file}" for route in sorted(named - served)]
        described = {name for _, name, _ in TABLE.findall(part)}
        for file_, name, _ in TABLE.findall(part):
            for field in fields(file_, name):
                needed = {word for word in re.findall(r"`(\w+)`\)", field.kind)}
                found += [f"http.md has no table of `{one}`, the type of {name}.{field.name}" for one in needed - described]
    return found


def written(page):
    """The page with its tables made anew."""
    return TABLE.sub(lambda match: f"<!-- fields: {match[1]} {match[2]} -->\n{table(match[1], match[2])}\n<!-- end -->", page)


def table(file, name):
    rows = [f"| `{field.name}` | {field.kind} | {field.meaning.replace('`None`', '`null`')} |" for field in fields(file, name)]
    return "\n".join(["| field | value | meaning |", "| --- | --- | --- |", *rows])


def fields(file, name):
    """The fields of a type in JSON."""
    text = (ROOT / file).read_text()
    found = re.search(
        rf"((?:^(?:///|#\[)[^\n]*\n)*)^(?:pub(?:\(\w+\))? )?(struct|enum) {name}(?:<[^>\n]*>)? {{\n(.*?)^}}", text, re.S | re.M
    )
    assert found, f"{file} has no type {name}"
    attributes, kind, body = found.groups()
    return variants(file, attributes, body) if kind == "enum" else members(file, body)


def members(file, body):
    result, doc, serde = [], [], []
    for line in body.splitlines():
        line = line.strip()
        if line.startswith("///"):
            doc.append(line[3:].strip())
        elif line.startswith("#[serde("):
            serde += serde_words(line)
        elif match := FIELD.fullmatch(line):
            assert doc, f"{file}: {match[1]} is not documented"
            if "flatten" in serde:
                result += fields(file, match[2])
            else:
                assert set(serde) <= HARMLESS, f"{file}: {match[1]} is told {serde}, which this script does not know"
                result.append(Field(match[1], shown(match[2]), " ".join(doc)))
            doc, serde = [], []
        else:
            assert not line or line.startswith("#["), f"{file}: not understood: {line}"
    return result


def variants(file, attributes, body):
    """The variants of an enum that a field names."""
    words = serde_words(attributes)
    tag = next((word[7:-1] for word in words if word.startswith('tag = "')), None)
    assert tag and 'rename_all = "snake_case"' in words, f"{file}: an enum that this script does not understand"
    names, result = [], []
    pattern = r"((?:^    ///[^\n]*\n)+)(?:^    #\[[^\n]*\n)*^    (\w+)(?:\((\w+)\)| \{(?:\n(.*?)^    )?\})?,"
    for doc, variant, inner, own in re.findall(pattern, body, re.S | re.M):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", variant).lower()
        names.append(f"`{name}`: {' '.join(line.strip(' /') for line in doc.splitlines())}")
        more = fields(file, inner) if inner else members(file, own)
        result += [Field(one.name, one.kind, f"{one.meaning} For `{name}` only.") for one in more]
    return [Field(tag, "text", " ".join(names)), *result]


def serde_words(text):
    return [word.strip() for words in re.findall(r"#\[serde\((.*?)\)\]", text) for word in words.split(",")]


def shown(kind):
    """The form of a Rust type in JSON."""
    if match := re.fullmatch(r"Option<(.+)>", kind):
        return f"{shown(match[1])}, or null"
    if match := re.fullmatch(r"Vec<(.+)>", kind):
        return f"list of {shown(match[1])}"
    if match := re.fullmatch(r"BTreeMap<\w+, (.+)>", kind):
        return f"object: {shown(match[1])} by name"
    kind = re.sub(r"^&'a ", "&", kind)
    return PLAIN.get(kind) or f"object (`{kind}`)"


def roots(heading):
    """The paths of a server, and the type of each answer that is JSON."""
    part = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for section in re.split(r"^### ", part, flags=re.M)[1:]:
        method, path = re.match(r"`(\w+) (\S+)`", section).groups()
        table_ = TABLE.search(section)
        yield method, path, table_ and (table_[1], table_[2])


def differences(answer, file, name):
    """The fields of an answer that its table lacks, and the reverse. Null and empty lists are always fine."""
    if isinstance(answer, list):
        return [line for one in answer for line in differences(one, file, name)]
    described = {field.name: field for field in fields(file, name)}
    wrong = [f"{name}: `{key}` is not described" for key in answer if key not in described]
    wrong += [f"{name}: no `{key}`" for key in described if key not in answer]
    places = {type_: place for place, type_, _ in TABLE.findall(PAGE.read_text()) if place.split("/")[0] == file.split("/")[0]}
    for key, value in answer.items():
        inner = re.search(r"\(`(\w+)`\)", described[key].kind) if key in described else None
        if inner and value:
            wrong += differences(value, places[inner[1]], inner[1])
    return wrong

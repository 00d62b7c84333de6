//! Compares the names of types with the glossary of CONTRIBUTING.md.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::architecture::{root, sources};

/// The types whose whole name is a word of the glossary, and where each is defined. All of them mean what the glossary says: a
/// message, a class of Python and the store's record of a lease are sides of one lease. A type that means something else takes
/// another name.
const BEARERS: &[(&str, &[&str])] = &[
    ("Actor", &["tests/simulation/src/actor.rs"]),
    ("Arena", &["node/src/arena.rs", "tests/src/flip.rs"]),
    ("Block", &["client/python/src/view.rs", "node/core/src/store/index/chunk.rs"]),
    ("BlockThread", &["node/src/exchange/block_threads.rs"]),
    (
        "Chunk",
        &[
            "client/cli/src/commands/events.rs",
            "client/cli/src/replay/losses.rs",
            "node/core/src/prefixes.rs",
            "node/core/src/store/index/chunk.rs",
            "tests/simulation/src/scale/blocks.rs",
            "tests/src/model.rs",
        ],
    ),
    ("Commit", &["client/protocol/src/session.rs"]),
    ("Core", &["node/core/src/lib.rs"]),
    (
        "Device",
        &["client/device/src/device.rs", "node/core/src/device.rs", "node/core/src/directory/outbox.rs"],
    ),
    ("DeviceLane", &["node/src/device_lane.rs"]),
    ("Drain", &["node/core/src/drain.rs"]),
    ("Effect", &["node/core/src/effect.rs", "node/core/src/exchange.rs"]),
    (
        "Engine",
        &[
            "client/cli/src/replay/engine.rs",
            "node/src/actor.rs",
            "tests/gpu/src/engine.rs",
            "tests/gpu/src/node.rs",
            "tests/simulation/src/engine.rs",
            "tests/src/soak/engine.rs",
        ],
    ),
    ("Epoch", &["client/protocol/src/table.rs"]),
    ("Exchange", &["node/core/src/exchange.rs"]),
    ("Extent", &["client/protocol/src/lease.rs", "node/core/src/store/slab.rs"]),
    (
        "Follow",
        &[
            "client/protocol/src/handoff.rs",
            "client/python/src/handoff.rs",
            "client/rust/src/follow.rs",
            "node/core/src/store/follow.rs",
        ],
    ),
    ("Gather", &["node/core/src/store/gather.rs"]),
    ("Grant", &["node/src/exchange.rs"]),
    ("HandOver", &["client/protocol/src/handoff.rs"]),
    ("Holder", &["client/protocol/src/table.rs"]),
    ("Home", &["node/core/src/directory/outbox.rs"]),
    (
        "Lease",
        &["client/protocol/src/session.rs", "client/python/src/lease.rs", "node/core/src/store/sessions.rs"],
    ),
    ("Life", &["tests/simulation/src/world.rs", "tests/src/soak/nodes.rs"]),
    (
        "Namespace",
        &[
            "client/python/src/namespace.rs",
            "client/rust/src/namespace.rs",
            "node/core/src/store/namespaces.rs",
            "node/core/src/tiers/described.rs",
            "node/src/metrics/rates.rs",
        ],
    ),
    ("Pin", &["client/protocol/src/session.rs", "node/core/src/store/pins.rs"]),
    ("Place", &["client/protocol/src/lease.rs"]),
    ("Pool", &["client/cli/src/namespace_file.rs", "node/core/src/store/namespaces.rs"]),
    (
        "Reservation",
        &[
            "client/python/src/reservation.rs",
            "client/rust/src/reservation.rs",
            "node/core/src/store/sessions.rs",
        ],
    ),
    ("Row", &["node/core/src/directory/shard.rs"]),
    ("Sibling", &["node/src/siblings.rs"]),
    ("Slot", &["node/core/src/device/slots.rs", "node/core/src/store/ids.rs"]),
    ("Taker", &["node/core/src/drain/takers.rs"]),
    ("Tier", &["client/protocol/src/session.rs", "tests/simulation/src/tiers.rs"]),
    ("Window", &["client/rust/src/window.rs", "node/src/window.rs"]),
];

/// The words of the glossary, as types would be named.
fn glossary() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let (_, table) = text.split_once("| word | meaning |\n| --- | --- |\n").unwrap();
    let rows = table.lines().take_while(|line| line.starts_with('|'));
    let words = rows.flat_map(|row| row.split('|').nth(1).unwrap().split(',')).map(str::trim);
    words.map(|word| word.split(' ').map(capitalised).collect()).collect()
}

fn capitalised(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect()
}

/// The name of the type that a line defines.
fn defined(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = line.strip_prefix("pub").map_or(line, |rest| {
        rest.strip_prefix('(')
            .and_then(|rest| rest.split_once(')'))
            .map_or(rest, |(_, rest)| rest)
            .trim_start()
    });
    let kinds = ["struct ", "enum ", "trait ", "type "];
    let name = kinds.iter().find_map(|kind| line.strip_prefix(kind))?;
    name.split(|letter: char| !letter.is_alphanumeric()).next()
}

#[test]
fn a_type_that_is_named_by_a_word_of_the_glossary_means_that() {
    let glossary = glossary();
    assert!(glossary.contains("DeviceLane") && glossary.len() > 40, "{glossary:?}");
    let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let sources = sources();
    let tested =
        |file: &str| file.contains("/tests/") || file.ends_with("tests.rs") || file.contains("/examples/");
    for (file, text) in sources.iter().filter(|(file, _)| !tested(file)) {
        for name in text.lines().filter_map(defined).filter(|&name| glossary.contains(name)) {
            found.entry(name).or_default().insert(file);
        }
    }
    let listed: BTreeMap<&str, BTreeSet<&str>> =
        BEARERS.iter().map(|&(name, files)| (name, files.iter().copied().collect())).collect();
    for (name, files) in &found {
        let listed = listed.get(name).cloned().unwrap_or_default();
        let new: Vec<_> = files.difference(&listed).collect();
        assert!(
            new.is_empty(),
            "{name} is a word of the glossary, and {new:?} define a type of that name: take another name, or list it here if it \
             means the same"
        );
    }
    for (name, files) in &listed {
        let gone: Vec<_> = files.difference(found.get(name).unwrap_or(&BTreeSet::new())).copied().collect();
        assert!(gone.is_empty(), "{gone:?} define no {name} any more");
    }
}

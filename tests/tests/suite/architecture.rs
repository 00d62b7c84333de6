//! Compares ARCHITECTURE.md with the tree.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Every Rust file of the workspace, by its path from the root.
pub(super) fn sources() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders: Vec<PathBuf> =
        ["client", "node", "coordinator", "tests"].iter().map(|folder| root().join(folder)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
                found.insert(name, fs::read_to_string(&path).unwrap());
            }
        }
    }
    found
}

#[test]
fn dependencies_between_crates_run_one_way() {
    let order = [
        "skips",
        "protocol",
        "device",
        "ipc",
        "client",
        "python",
        "net",
        "core",
        "node",
        "coordinator",
        "cli",
        "tests",
        "fuzz",
        "gpu",
    ];
    let folders = [
        "tests/skips",
        "client/protocol",
        "client/device",
        "client/ipc",
        "client/rust",
        "client/python",
        "client/net",
        "node/core",
        "node",
        "coordinator",
        "client/cli",
        "tests",
        "tests/fuzz",
        "tests/gpu",
    ];
    for (i, folder) in folders.iter().enumerate() {
        let manifest = fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        for (j, other) in order.iter().enumerate() {
            let names_it = manifest.lines().any(|line| line.starts_with(&format!("larder-{other}.")));
            let allowed = j < i && !(*folder == "coordinator" && *other == "node");
            assert!(!names_it || allowed, "{folder} must not depend on larder-{other}");
        }
    }
}

/// The crates whose modules do not name each other in a circle.
const WITHOUT_CYCLES: &[&str] = &[
    "client/protocol",
    "client/device",
    "client/ipc",
    "client/net",
    "client/rust",
    "client/python",
    "client/cli",
    "node/core",
    "node",
    "coordinator",
    "tests",
    "tests/gpu",
];

/// The dependencies of the core and of `larder-protocol`, its only neighbor in the workspace: no runtime, no system.
const CORE_DEPENDENCIES: &[&str] = &[
    "blake3",
    "hashbrown",
    "larder-protocol",
    "rkyv",
    "serde",
    "sha2",
    "smallvec",
    "strum",
    "thiserror",
    "xxhash-rust",
];

/// Names that the core may not use.
const IO: &[&str] =
    &["std::fs", "std::io", "std::net", "std::os", "std::process", "std::thread", "Instant", "SystemTime"];

/// The module at the top of `folder` that a file belongs to; `None` for files outside of `folder`, for tests, and for the crate's
/// root.
fn module_of<'a>(name: &'a str, folder: &str) -> Option<&'a str> {
    let path = name.strip_prefix(folder)?;
    let module = path.split('/').next()?.trim_end_matches(".rs");
    let is_test = path.split('/').any(|part| part.trim_end_matches(".rs") == "tests");
    (!is_test && module != "lib").then_some(module)
}

/// The modules of its own crate that a file names, without the tests within the file.
fn named_modules(text: &str) -> BTreeSet<String> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    let mut named = BTreeSet::new();
    for path in code.split("crate::").skip(1) {
        let (list, mut depth) = (path.strip_prefix('{'), 0);
        let names = list.map_or(path, |list| list.split("};").next().unwrap());
        let apart = names.split(|letter| {
            depth += i32::from(letter == '{') - i32::from(letter == '}');
            depth == 0 && letter == ','
        });
        let apart = apart.take(if list.is_some() { usize::MAX } else { 1 });
        named.extend(
            apart.map(|name| name.trim().chars().take_while(|&letter| is_of_a_name(letter)).collect()),
        );
    }
    named
}

fn is_of_a_name(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

#[test]
fn modules_of_a_crate_do_not_name_each_other_in_a_circle() {
    let sources = sources();
    for folder in WITHOUT_CYCLES {
        let folder = format!("{folder}/src/");
        let mut modules = BTreeMap::<&str, BTreeSet<String>>::new();
        for (name, text) in &sources {
            let Some(module) = module_of(name, &folder) else { continue };
            let others = named_modules(text).into_iter().filter(|other| other != module);
            modules.entry(module).or_default().extend(others);
        }
        assert!(!modules.is_empty(), "{folder} has no modules");
        // Removes modules that name no remaining module. A circle stays, and so do modules that name it.
        loop {
            let left: BTreeSet<String> = modules.keys().map(ToString::to_string).collect();
            modules.retain(|_, others| !others.is_disjoint(&left));
            if modules.len() == left.len() {
                break;
            }
        }
        assert!(modules.is_empty(), "{folder}: a circle is among {modules:#?}");
    }
}

#[test]
fn a_name_is_found_alone_and_in_a_list() {
    let text = "use crate::a::{b, c};\nuse crate::{d::{e, f}, g};\n// crate::h\nfn x() { crate::i() }";
    assert_eq!(named_modules(text).into_iter().collect::<Vec<_>>(), ["a", "d", "g", "i"]);
}

#[test]
fn the_core_does_no_io_and_knows_no_clock() {
    let mut dependencies = BTreeSet::new();
    for folder in ["node/core", "client/protocol"] {
        let manifest = fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        let own = manifest.split("\n[dependencies]\n").nth(1).unwrap().split("\n\n").next().unwrap();
        dependencies.extend(own.lines().map(|line| line.split(['.', ' ']).next().unwrap().to_owned()));
    }
    let unknown: Vec<_> = dependencies.iter().filter(|name| !CORE_DEPENDENCIES.contains(&&***name)).collect();
    assert!(unknown.is_empty(), "the core does no IO; is that so of {unknown:?}?");
    for (name, text) in sources() {
        if module_of(&name, "node/core/src/").is_none() {
            continue;
        }
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
            let io = IO.iter().find(|io| line.contains(*io));
            assert!(io.is_none(), "{name} does IO, or asks a clock: {line}");
        }
    }
}

#[test]
fn unsafe_code_stays_in_the_files_that_may_have_it() {
    let may_have_it = [
        "client/cli/src/doctor/clock.rs",
        "client/cli/src/heap.rs",
        "client/device/src/cuda.rs",
        "client/device/src/cuda/driver.rs",
        "client/device/src/cuda/enqueue.rs",
        "client/device/src/cuda/lane.rs",
        "client/device/src/cuda/tests/fake.rs",
        "client/device/src/memory.rs",
        "client/ipc/src/mapping.rs",
        "client/net/src/quic/steer.rs",
        "client/protocol/src/checksum/xxh3.rs",
        "client/protocol/src/chunk.rs",
        "client/python/src/memory.rs",
        "client/python/src/view.rs",
        "node/src/arena/extent.rs",
        "node/src/arena/mapping.rs",
        "node/src/arena/numa.rs",
        "node/src/disk/io/uring.rs",
        "node/src/processes/socket_process.rs",
    ];
    let marker = ["expect", "(unsafe_code"].concat();
    let has_it: Vec<String> =
        sources().into_iter().filter(|(_, text)| text.contains(&marker)).map(|(name, _)| name).collect();
    assert_eq!(has_it, may_have_it);
}

#[test]
fn every_file_says_its_job_in_its_first_line() {
    for (name, text) in sources() {
        assert!(text.starts_with("//! "), "{name} does not start with what it is for");
    }
}

#[test]
fn every_invariant_names_a_test_that_exists() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let sources = sources();
    let invariants = text.split("## Invariants").nth(1).unwrap().split("\n## ").next().unwrap();
    let invariants: Vec<&str> = invariants.split("\n- ").skip(1).collect();
    assert!(invariants.len() >= 40);
    for invariant in invariants {
        let named: Vec<&str> = invariant.split('`').filter(|word| word.ends_with(".rs")).collect();
        assert!(!named.is_empty(), "no test is named: {invariant}");
        for path in named {
            assert!(sources.keys().any(|name| name.ends_with(path)), "there is no {path}");
        }
    }
}

#[test]
fn every_file_that_the_journeys_name_exists() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let journeys = text.split("## Journeys").nth(1).unwrap().split("## ").next().unwrap();
    let named: Vec<&str> = journeys.split('`').filter(|word| word.ends_with(".rs")).collect();
    assert!(named.len() > 20);
    for path in named {
        assert!(root().join(path).exists(), "there is no {path}");
    }
}

#[test]
fn a_journey_reads_in_six_files_at_most() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let journeys = text.split("## Journeys").nth(1).unwrap().split("## ").next().unwrap();
    for journey in journeys.lines().filter(|line| line.starts_with("| ")) {
        assert!(journey.matches('`').count() <= 12, "more than six files: {journey}");
    }
}

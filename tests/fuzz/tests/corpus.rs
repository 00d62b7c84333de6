//! Runs every target over its examples, damaged variants of them, and the corpus, without cargo-fuzz.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::alloc::System;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use larder_fuzz::{TARGETS, Target};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Memory is counted for the whole process, so tests of one process run one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The kept findings of cargo-fuzz for a target: the files in its folder.
fn corpus(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let Ok(folder) = fs::read_dir(root().join("corpus").join(target.name)) else { return Vec::new() };
    let paths = folder.map(|entry| entry.unwrap().path());
    paths.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// The input cut short, made longer, and with one byte changed, at places spread over the whole input.
fn neighbours(input: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let step = (input.len() / MOST_PLACES).max(1);
    let places = (0..input.len()).step_by(step);
    let cut = places.clone().map(|at| input[..at].to_vec());
    let changed = places.flat_map(move |at| {
        let change = move |byte: u8| {
            let mut bytes = input.to_vec();
            bytes[at] = byte;
            bytes
        };
        let now = input[at];
        [0, 0xff, now ^ 1, now ^ 0x80].map(change)
    });
    let longer = [1, 16, 4_096].into_iter().map(move |more| [input, &vec![0xff; more]].concat());
    cut.chain(changed).chain(longer)
}

#[test]
fn examples_are_right_for_their_own_target() {
    let _alone = alone();
    for target in TARGETS {
        let examples = (target.examples)();
        assert!(examples.len() >= 3, "{} has {} examples", target.name, examples.len());
        for (number, example) in examples.iter().enumerate() {
            assert!((target.run)(example), "{}: example {number} is refused", target.name);
        }
    }
}

#[test]
fn damaged_examples_hold_the_properties_and_some_are_refused() {
    let _alone = alone();
    for target in TARGETS {
        let (mut tried, mut right) = (0, 0);
        for neighbour in
            (target.examples)().iter().flat_map(|example| neighbours(example).collect::<Vec<_>>())
        {
            tried += 1;
            right += u32::from((target.run)(&neighbour));
        }
        println!("{}: {right} of {tried} damaged inputs are right", target.name);
        assert!(tried > 100 && right < tried, "{}: {right} of {tried} damaged inputs are right", target.name);
    }
}

#[test]
fn examples_of_other_targets_hold_the_properties() {
    let _alone = alone();
    let all: Vec<_> = TARGETS.iter().flat_map(|target| (target.examples)()).collect();
    for target in TARGETS {
        for example in &all {
            (target.run)(example);
        }
    }
}

#[test]
fn every_input_of_the_corpus_holds_the_properties() {
    let _alone = alone();
    for target in TARGETS {
        for (path, input) in corpus(target) {
            println!("{}", path.display());
            (target.run)(&input);
        }
    }
}

#[test]
fn no_input_takes_more_memory_than_its_length_allows() {
    let _alone = alone();
    for target in TARGETS {
        let examples = (target.examples)();
        let damaged = examples.iter().flat_map(|example| neighbours(example).step_by(7).collect::<Vec<_>>());
        let inputs: Vec<_> = damaged.chain(corpus(target).into_iter().map(|(_, input)| input)).collect();
        // One-time allocations of the process do not count for any input.
        (target.run)(&examples[0]);
        let mut most = 0;
        for input in &inputs {
            let region = Region::new(ALLOCATOR);
            (target.run)(input);
            let taken = region.change().bytes_allocated;
            let allowed = FIXED_BYTES + BYTES_OF_A_BYTE * input.len();
            assert!(taken <= allowed, "{}: an input of {} bytes took {taken}", target.name, input.len());
            most = most.max(taken);
        }
        println!("{}: {most} bytes at most", target.name);
    }
}

#[test]
fn every_target_is_a_program_of_cargo_fuzz_and_every_folder_a_target() {
    let _alone = alone();
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let names = |prefix: &str, suffix: &str| -> BTreeSet<String> {
        let lines = manifest.lines().filter_map(|line| line.strip_prefix(prefix)?.strip_suffix(suffix));
        lines.map(str::to_owned).collect()
    };
    let targets: BTreeSet<_> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(names("path = \"targets/", ".rs\""), targets);
    for folder in fs::read_dir(root().join("corpus")).unwrap() {
        let name = folder.unwrap().file_name().into_string().unwrap();
        assert!(targets.contains(&name) || name == "README.md", "{name} is no target");
    }
}

/// Places of an input at which it is damaged.
const MOST_PLACES: usize = 200;

/// Memory that a target may take for any input: buffers, sockets, keys.
const FIXED_BYTES: usize = 256 << 10;

/// Memory that a target may take for each byte of the input.
const BYTES_OF_A_BYTE: usize = 64;

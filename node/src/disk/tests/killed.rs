//! A process that writes is killed: the chunks that it reported as written are there.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use larder_core::store::ids::ChunkKey;

use super::*;

/// Tells the test below that it is the process to be killed. The value has the folder and the first chunk.
const VICTIM: &str = "LARDER_DISK_VICTIM";

#[test]
fn what_a_killed_process_said_was_written_is_there() {
    if let Ok(victim) = std::env::var(VICTIM) {
        let (first, folder) = victim.split_once(' ').unwrap();
        write_until_killed(&PathBuf::from(folder), first.parse().unwrap());
    }
    let rounds = if std::env::var_os("LARDER_HEAVY_TESTS").is_some() { 200 } else { 20 };
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let folder = tempfile::tempdir().unwrap();
    let (mut must, mut next, mut told) = (BTreeSet::new(), 0, 0);
    for _ in 0..rounds {
        let lines = kill_one(folder.path(), next, &mut random);
        for line in &lines {
            let (what, number) = line.split_once(' ').unwrap();
            let number: u64 = number.parse().unwrap();
            next = next.max(number);
            match what {
                "durable" => {
                    told += 1;
                    must.insert(number);
                }
                "gone" => {
                    must.remove(&number);
                }
                other => panic!("{other}"),
            }
        }
        // Skips chunks that it may have written without saying so.
        next += 64;
        check(folder.path(), &mut must);
    }
    println!("{rounds} times killed, {told} chunks acknowledged, {} of them there in the end", must.len());
    assert!(told > rounds, "some were written before each end");
}

/// Checks that every chunk that must be there is there, and right.
fn check(folder: &Path, must: &mut BTreeSet<u64>) {
    let metrics = metrics();
    let (on_gone, gone) = gone();
    let tier = DiskTier::open(&options(folder), metrics, on_gone).unwrap();
    let slots = Slots::new();
    for number in must.clone() {
        let answer = tier.read(slots.read_order(TestChunk(number))).unwrap().blocking_recv().unwrap();
        // A tier with few free segments gives up some segments while nobody asks, and says so first.
        for gone in gone.try_iter() {
            assert_eq!(gone.why, Why::Evicted);
            gone.chunks.iter().for_each(|key| {
                must.remove(&number_of(key));
            });
        }
        if must.contains(&number) {
            slots.assert_right(TestChunk(number), &answer);
        }
    }
    drop(tier);
    for gone in gone.try_iter().flat_map(|gone| gone.chunks) {
        must.remove(&number_of(&gone));
    }
}

/// Starts a process, and kills it somewhere in its work. Returns what it said until then.
fn kill_one(folder: &Path, first: u64, random: &mut fastrand::Rng) -> Vec<String> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "disk::tests::killed::what_a_killed_process_said_was_written_is_there",
            "--nocapture",
        ])
        .env(VICTIM, format!("{first} {}", folder.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut lines = Vec::new();
    let enough = random.usize(1..60);
    let mut said = |child: &mut Child, lines: &mut Vec<String>| {
        let mut line = String::new();
        let read = out.read_line(&mut line).unwrap();
        // The harness prints lines of its own.
        if read > 0 && line.starts_with("larder-disk ") && line.ends_with('\n') {
            lines.push(line.trim().trim_start_matches("larder-disk ").to_owned());
        }
        assert!(read > 0 || child.try_wait().unwrap().is_some(), "it goes on until it is killed");
        read > 0
    };
    while lines.len() < enough && said(&mut child, &mut lines) {}
    std::thread::sleep(Duration::from_micros(random.u64(..3_000)));
    child.kill().unwrap();
    child.wait().unwrap();
    while said(&mut child, &mut lines) {}
    lines
}

/// Writes chunk after chunk, several at a time, reads some, and reports which chunks became durable and which are gone.
fn write_until_killed(folder: &Path, first: u64) -> ! {
    // The harness may be in the middle of a line.
    println!();
    let say = |what: &str, number: u64| {
        let mut out = std::io::stdout().lock();
        out.write_all(format!("larder-disk {what} {number}\n").as_bytes()).unwrap();
        out.flush().unwrap();
    };
    let on_gone = move |gone: Gone| gone.chunks.iter().for_each(|key| say("gone", number_of(key)));
    let tier = DiskTier::open(&options(folder), metrics(), Box::new(on_gone)).unwrap();
    let mut slots = Slots::new();
    let mut random = fastrand::Rng::with_seed(first);
    let mut waiting = std::collections::VecDeque::new();
    for number in first.. {
        waiting.push_back((number, tier.write(slots.write_order(TestChunk(number))).unwrap()));
        if waiting.len() > random.usize(..12)
            && let Some((number, answer)) = waiting.pop_front()
        {
            assert_eq!(answer.blocking_recv(), Ok(WriteAnswer::Durable));
            say("durable", number);
        }
        if random.u8(..4) == 0 {
            let read = tier.read(slots.read_order(TestChunk(random.u64(first..=number)))).unwrap();
            read.blocking_recv().unwrap();
        }
    }
    unreachable!("there are enough numbers")
}

fn number_of(key: &ChunkKey) -> u64 {
    u64::from_le_bytes(key.hash.0[8..16].try_into().unwrap())
}

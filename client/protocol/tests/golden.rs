//! Messages of every version that this release speaks, byte for byte: `golden/VERSION.txt` has a line for each message, with its
//! name and its bytes in hex. The first release of a version wrote the version's file, and nobody changes the file afterwards.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

#[path = "golden/samples.rs"]
mod samples;

use larder_protocol::drain::{
    AfterDrain, DrainCommand, DrainCounts, DrainReport, DrainStart, Take, TakeChunk, TakeNamespace, Taken,
};
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, InUse, Joined, Standing};
use larder_protocol::peer::{Chunks, FollowChunks, OfferChunks, PeerRequest, PeerResponse, Room, Show};
use larder_protocol::pin::{DevicePin, PinCommand, PinStart};
use larder_protocol::purge::{NamespaceName, PurgeCommand, PurgeCounts, PurgeMode, PurgeReport, PurgeScope};
use larder_protocol::reload::{ChangedSetting, Reloaded};
use larder_protocol::session::Request;
use larder_protocol::table::{Epoch, MemberState, NewHome, NodeNumber, TablePage};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint, PoolSet};
use rkyv::util::AlignedVec;

use self::samples::{Sample, member, messages, of_version_1, requests, spec};

const VERSION_1: &str = include_str!("golden/1.txt");
const VERSION_2: &str = include_str!("golden/2.txt");

fn page() -> TablePage {
    TablePage {
        from: Epoch { term: 3, number: 8 },
        to: Epoch { term: 3, number: 9 },
        gone: vec![NodeNumber(4)],
        members: vec![member(5, MemberState::Draining)],
        homes: vec![NewHome { partition: 16_383, home: NodeNumber(5) }],
        is_last: true,
    }
}

fn standing() -> Standing {
    Standing { term: 3, life: 4, leads: false, leader: Some("larder.example:7601".into()) }
}

fn chunk() -> ChunkRef {
    let hash = |byte| ChunkHash([byte; 32]);
    ChunkRef { hash: hash(1), parent: hash(2), index: 3, anchor: hash(4) }
}

/// Requests of version 2 that version 1 does not have.
fn new_requests() -> Vec<PeerRequest> {
    let start = DrainStart { within_ms: 1, bytes_per_second: Some(2), then: AfterDrain::Restart };
    let fingerprint = Fingerprint([5; 32]);
    vec![
        PeerRequest::Offer(OfferChunks { device: 1, fingerprint, worth: 2, chunks: vec![chunk()] }),
        PeerRequest::Take(Box::new(Take {
            from: 1,
            to: 2,
            namespace: Some(TakeNamespace { tenant: "chat".into(), spec: spec() }),
            chunks: vec![TakeChunk { chunk: chunk(), rank_ppm: 5 }],
        })),
        PeerRequest::Drain(DrainCommand::Start(start)),
        PeerRequest::Drain(DrainCommand::Start(DrainStart { then: AfterDrain::Stop, ..start })),
        PeerRequest::Drain(DrainCommand::Cancel),
        PeerRequest::Drain(DrainCommand::Report),
        PeerRequest::Reload,
        PeerRequest::Purge(Box::new(PurgeCommand::Start(
            PurgeScope::Tenant("chat".into()),
            PurgeMode::Count,
        ))),
        PeerRequest::Purge(Box::new(PurgeCommand::Start(
            PurgeScope::Chunks(NamespaceName([6; 8]), vec![ChunkHash([1; 32])]),
            PurgeMode::Remove,
        ))),
        PeerRequest::Purge(Box::new(PurgeCommand::Report(7))),
        PeerRequest::Purge(Box::new(PurgeCommand::End(7))),
        PeerRequest::Show(Show { path: "/lookups".into(), body: b"{}".to_vec() }),
        PeerRequest::Pin(Box::new(PinCommand::Start(PinStart {
            fingerprint,
            hashes: vec![ChunkHash([7; 32])],
            duration_ms: 8,
        }))),
        PeerRequest::Pin(Box::new(PinCommand::End(1, 9))),
        PeerRequest::follow(
            FollowChunks {
                chunks: Chunks { device: 1, fingerprint, hashes: vec![ChunkHash([7; 32])] },
                order: 2,
                attempt: 3,
                patience_ms: 4,
            },
            vec![PoolSet(5)],
        ),
    ]
}

/// Answers of version 2 that version 1 does not have.
fn new_responses() -> Vec<PeerResponse> {
    let counts = DrainCounts { found: 1, moved: 2, moved_bytes: 3, elsewhere: 4, kept_below: 5, left: 6 };
    let purged =
        PurgeCounts { memory_chunks: 1, memory_bytes: 2, read_chunks: 3, disk_chunks: 4, objects: 5 };
    vec![
        PeerResponse::Room(Room { least: 7, served: 8 }),
        PeerResponse::Wanted(vec![true, false]),
        PeerResponse::Taken(Taken {
            is_kept: vec![false, true],
            free_chunks: 1,
            free_bytes: 2,
            rank_limit_ppm: 3,
        }),
        PeerResponse::Drains(Box::new(DrainReport {
            is_draining: true,
            is_over: false,
            then: Some(AfterDrain::Stop),
            left_ms: 1,
            trouble: Some("why".into()),
            chunks: counts,
        })),
        PeerResponse::Reloaded(Box::new(Reloaded {
            applied: vec![ChangedSetting { key: "a".into(), before: "1".into(), after: "2".into() }],
            at_restart: vec!["b".into()],
        })),
        PeerResponse::Purges(Box::new(PurgeReport {
            purge: 7,
            is_over: true,
            trouble: Some("why".into()),
            counts: purged,
        })),
        PeerResponse::Shown(b"[]".to_vec()),
        PeerResponse::Pinned(vec![DevicePin { device: 1, pin: 2, chunks: 3, duration_ms: 4 }]),
    ]
}

/// Messages of version 2 that version 1 does not have.
fn new_in_version_2() -> Vec<Sample> {
    let followers = vec![
        FollowerMessage::Drains(true),
        FollowerMessage::Brings(page()),
        FollowerMessage::Rival(([10, 0, 0, 1], 7_601).into()),
        FollowerMessage::Who(Some(standing())),
        FollowerMessage::Who(None),
        FollowerMessage::Reload,
        FollowerMessage::Forget("node-1".into()),
    ];
    let coordinators = vec![
        CoordinatorMessage::Joined(Joined { number: NodeNumber(3), heartbeat_ms: 1_000 }),
        CoordinatorMessage::Outdated(5),
        CoordinatorMessage::Removed,
        CoordinatorMessage::Table(page()),
        CoordinatorMessage::Heard,
        CoordinatorMessage::InUse(InUse { address: ([10, 0, 0, 1], 1).into(), retry_after_ms: 2 }),
        CoordinatorMessage::Contested(([10, 0, 0, 1], 1).into()),
        CoordinatorMessage::Refused("why".into()),
        CoordinatorMessage::Standing(standing()),
        CoordinatorMessage::Bring,
        CoordinatorMessage::Reloaded(Box::new(Reloaded {
            applied: Vec::new(),
            at_restart: vec!["b".into()],
        })),
        CoordinatorMessage::Forgot(true),
    ];
    let mut all = messages("peer-request-since-2", new_requests());
    all.extend(messages("peer-response-since-2", new_responses()));
    all.extend(requests("request-since-2", vec![Request::Name("req-7".into()), Request::Observe]));
    all.extend(messages("follower-since-2", followers));
    all.extend(messages("coordinator-v2", coordinators));
    all
}

fn of_version_2() -> Vec<Sample> {
    let mut all = of_version_1();
    all.retain(|sample| !sample.name.starts_with("coordinator-v1"));
    all.extend(new_in_version_2());
    all
}

fn lines(samples: &[Sample]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    samples.iter().map(|sample| format!("{} {}\n", sample.name, hex(&sample.bytes))).collect()
}

/// The name and the bytes of a line's message, aligned as a reader has them.
fn bytes(line: &str) -> (&str, AlignedVec) {
    let (name, hex) = line.split_once(' ').unwrap();
    let mut bytes = AlignedVec::new();
    let digits = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    hex.as_bytes().chunks_exact(2).for_each(|pair| bytes.push(digits(pair)));
    (name, bytes)
}

fn assert_read(golden: &str, samples: &[Sample]) {
    assert_eq!(golden.lines().count(), samples.len());
    for (line, sample) in golden.lines().zip(samples) {
        let (name, bytes) = bytes(line);
        assert_eq!(name, sample.name);
        assert!((sample.is)(&bytes), "{name} is read as another message than the one that was written");
    }
}

fn assert_written(golden: &str, samples: &[Sample]) {
    for (line, written) in golden.lines().zip(lines(samples).lines()) {
        assert_eq!(line, written, "the wire has changed: that needs a new version, see CONTRIBUTING.md");
    }
}

#[test]
fn messages_that_version_1_wrote_are_read_as_what_they_were() {
    assert_read(VERSION_1, &of_version_1());
}

#[test]
fn messages_to_version_1_are_written_as_it_wrote_them() {
    assert_written(VERSION_1, &of_version_1());
}

#[test]
fn messages_of_the_present_version_are_what_they_always_were() {
    // `GOLDEN=FILE cargo test -p larder-protocol --test golden` writes the file of a new version.
    if let Ok(path) = std::env::var("GOLDEN") {
        std::fs::write(path, lines(&of_version_2())).unwrap();
    }
    assert_read(VERSION_2, &of_version_2());
    assert_written(VERSION_2, &of_version_2());
}

#[test]
fn a_message_of_another_kind_or_with_a_byte_too_few_is_not_read_as_one_of_these() {
    for (line, sample) in VERSION_2.lines().zip(of_version_2()) {
        let (_, mut bytes) = bytes(line);
        bytes.pop();
        assert!(!(sample.is)(&bytes), "{}", sample.name);
    }
}

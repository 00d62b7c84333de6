//! The coverage of a run: every variant of the cores' events, effects and refusals.

use std::collections::BTreeMap;

use larder_coordinator::election::RegisterAnswer;
use larder_coordinator::membership::{Beat, JoinRefused};
use larder_core::exchange::Effect as Exchanged;
use larder_core::placement::Placement;
use larder_core::store::Refused;
use larder_core::{Arrival, CopyAnswer, DeviceEvent, Effect, Event, ReadAnswer, Written};
use larder_protocol::session::Request;

/// The number of times that each variant occurred.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coverage(BTreeMap<&'static str, u64>);

impl Coverage {
    /// Notes that something occurred.
    pub(crate) fn note(&mut self, name: &'static str) {
        *self.0.entry(name).or_default() += 1;
    }

    /// Adds the coverage of another run.
    pub fn add(&mut self, other: &Self) {
        other.0.iter().for_each(|(name, count)| *self.0.entry(name).or_default() += count);
    }

    /// Every variant, and how often it occurred.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let all = TABLES.iter().flat_map(|names| names.iter());
        all.map(|&name| (name, self.0.get(name).copied().unwrap_or(0)))
    }

    /// Variants that never occurred and should have.
    pub fn missing(&self) -> Vec<&'static str> {
        let is_excused = |name: &str| EXCUSED.iter().any(|(excused, _)| *excused == name);
        self.counts().filter(|&(name, count)| count == 0 && !is_excused(name)).map(|(name, _)| name).collect()
    }
}

macro_rules! names {
    ($all:ident, $name:ident of $type:ident as $label:literal: $($variant:ident),+ $(,)?) => {
        pub(crate) fn $name(of: &$type) -> &'static str {
            match of { $($type::$variant { .. } => concat!($label, "::", stringify!($variant)),)+ }
        }

        const $all: &[&str] = &[$(concat!($label, "::", stringify!($variant))),+];
    };
}

names!(EVENTS, event of Event as "Event":
    Asked, Closed, ProcessGone, PolicyIs, LimitsAre, Copied, Device, ExtentRenewed, ExtentLeft, Damaged, GrantEnded, SiblingsFound,
    HoldersFound, StoredFound, OrderEnded, OrderRefused, LayersCame, FollowedCame, FollowEnded, ReadEnded, WriteEnded,
    Described, SegmentVisited, LeftDisk, DiskClosed, DiskSilent, OfferEnded, Moved, Announced, PageAnnounced, Tick, Alarm, Drain, DrainCancelled,
    TakersAre, TakeAnswered, TenantsAre, Purge);

names!(EFFECTS, effect of Effect as "Effect":
    Answer, Done, Found, Prefetching, Leased, Refused, Copy, DeviceCopy, CancelDeviceCopy, Renew, Follow, TellFollower,
    FindSiblings, FindHolders, FindStored, Fetch, Hurry, CancelOrder, Read, Write, Touch, Remove, Disagrees, Describe,
    ForgetDescriptions, Knows, TellSiblings, Changed, AnnouncePage, Stale, TellDamaged, TellMoved, Granted, Condemned, Offer, Count,
    AskToTake, Taken, Purged, VisitSegment, TenantLeft);

names!(PLACEMENTS, placed of Placement as "Placement": Migrate, Replicate, Pass, Forwarded);

names!(REFUSALS, refused of Refused as "Refused":
    Busy, Chain, Namespace, BlockSize, BlockSizes, Slices, OtherSlices, TooManySessionNamespaces, TooManyNamespaces, BlockTooLarge, ChunkTooLarge, WindowTooSmall, TooLarge,
    FollowTooLarge, WriterName, Unknown, UnknownPin, NotOpen, Layers, LayersMissing, NotLeased, SeveralSlices, OutsideWindow, TooManyTensors, NoTensors,
    NoCopy, Beyond, Internal, OutOfOrder, Pools, Sources);

names!(ARRIVALS, arrival of Arrival as "Arrival": Here, NotHeld, Busy, Damaged, Failed);

names!(READS, read of ReadAnswer as "ReadAnswer": Here, Missing, Busy, Closed, Impossible, Lost);

names!(WRITES, written of Written as "Written": There, Failed, Busy, Closed);

names!(COPIES, copied of CopyAnswer as "CopyAnswer": Done, Busy, Impossible, Failed);

names!(DEVICE, device of DeviceEvent as "DeviceEvent": Took, Layers, Ended, Lost, Gone);

names!(EXCHANGE, exchanged of Exchanged as "exchange::Effect": Turn, Probe, Silent, Answers, Gone);

names!(REQUESTS, request of Request as "Request":
    Hello, Register, Lookup, Reserve, Commit, Abort, Lease, Release, Pin, Unpin, Prefetch, Progress, Collect, Cancel, HandOver,
    Follow, AskInPlace, Trace, RegisterTensors, LoadPages, SavePages, AskCopy, ForgetCopy, ReportDamage, Name, Describe, Observe);

names!(JOINS, join_refused of JoinRefused as "JoinRefused": Outdated, InUse, NotLeading, LaterTerm, Full, Implausible);

names!(BEATS, beat of Beat as "Beat": Heard, Contested, Removed, NotLeading, LaterTerm);

names!(ANSWERS, answer of RegisterAnswer as "election::RegisterAnswer": Found, Written, Conflict, Failed);

/// A coordinator takes over from a silent leader before the leader's lease is over.
pub(crate) const LEADER_IS_SILENT: &str = "election::silent";

const ELECTIONS: &[&str] = &[LEADER_IS_SILENT];

const TABLES: [&[&str]; 15] = [
    EVENTS, EFFECTS, PLACEMENTS, REFUSALS, ARRIVALS, READS, WRITES, COPIES, DEVICE, EXCHANGE, REQUESTS,
    JOINS, BEATS, ANSWERS, ELECTIONS,
];

/// Variants that cannot occur here, or do not occur once in thousands of seeds, with the reasons.
const EXCUSED: [(&str, &str); 13] = [
    (
        "Effect::Disagrees",
        "a record under a wrong name would have to outlive a restart, and be contradicted before it is read; a test of the core does so",
    ),
    ("ReadAnswer::Lost", "a tier's thread would have to panic, and its slots would stay unused for ever"),
    ("Refused::Internal", "only a fault of the product brings it about"),
    (
        "Refused::OtherSlices",
        "engines register a namespace with all their slices; a test of the store does not",
    ),
    ("Refused::TooManyNamespaces", "it takes hundreds of namespaces; a test of the store has them"),
    ("Refused::FollowTooLarge", "it takes thousands of blocks; a test of the store has them"),
    ("Refused::WriterName", "engines name nodes of the cluster; a test of the core has a longer name"),
    ("ReadAnswer::Impossible", "the store would have to order a read outside its memory"),
    ("CopyAnswer::Impossible", "the store would have to order a copy outside its memory"),
    (
        "JoinRefused::LaterTerm",
        "two coordinators would have to lead at once, or the register of the election to forget; a test of the coordinator has them",
    ),
    ("Beat::LaterTerm", "the same"),
    ("JoinRefused::Full", "it takes more members than a cluster may have"),
    ("JoinRefused::Implausible", "no node names a number that no clock and no coordinator brings about"),
];

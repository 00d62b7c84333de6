//! One seed: a cluster lives for a minute, faults stop, and nothing may be left.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use larder_core::placement::PlacementRule;
use larder_core::store::WritePolicy;
use larder_core::store::policy::PolicyName;

use crate::coverage::Coverage;
use crate::faults::{self, Fault};
use crate::world::{Settings, World};

/// The result of a seed.
#[derive(Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// The violation, if any.
    pub violation: Option<String>,
    /// The number of events.
    pub events: u64,
    /// A hash of the whole history.
    pub hash: u64,
    /// The variants that occurred.
    pub coverage: Coverage,
    /// The faults, by number.
    pub faults: Vec<(usize, String)>,
}

/// Runs a seed with all its faults, or only with the faults of these numbers.
#[must_use]
pub fn run(seed: u64, only: Option<&[usize]>, is_traced: bool) -> Outcome {
    let mut random = fastrand::Rng::with_seed(seed);
    let settings = settings(seed, &mut random);
    let planned = faults::plan(&mut random, settings.nodes, settings.coordinators);
    let chosen: Vec<(usize, Fault)> = planned
        .into_iter()
        .enumerate()
        .filter(|(number, _)| only.is_none_or(|only| only.contains(number)))
        .collect();
    let faults = chosen.iter().map(|(number, fault)| {
        (*number, format!("{:?} from {:?} to {:?}", fault.kind, fault.from, fault.until))
    });
    let faults = faults.collect();
    let chosen = chosen.into_iter().map(|(_, fault)| fault).collect();
    let mut world = None;
    let lived = catch_unwind(AssertUnwindSafe(|| {
        let world = world.insert(World::new(random.u64(..), settings, chosen, is_traced));
        live(world);
    }));
    let panicked = lived.err().map(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it says nothing");
        format!("a panic: {text}")
    });
    let (violation, events, hash, coverage) = match &mut world {
        Some(world) => {
            (world.violation.take(), world.events(), world.hash(), std::mem::take(&mut world.coverage))
        }
        None => (None, 0, 0, Coverage::default()),
    };
    Outcome { seed, violation: panicked.or(violation), events, hash, coverage, faults }
}

/// The smallest set of faults with which a seed still fails.
#[must_use]
pub fn shrink(seed: u64, faults: &[(usize, String)]) -> Vec<usize> {
    let mut kept: Vec<usize> = faults.iter().map(|(number, _)| *number).collect();
    for (number, _) in faults {
        let without: Vec<usize> = kept.iter().copied().filter(|kept| kept != number).collect();
        if run(seed, Some(&without), false).violation.is_some() {
            kept = without;
        }
    }
    kept
}

fn settings(seed: u64, random: &mut fastrand::Rng) -> Settings {
    let policies = PolicyName::ALL;
    let writes = [WritePolicy::WriteThrough, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack];
    Settings {
        nodes: 5,
        actors: 2,
        coordinators: [1, 1, 2, 3, 5][random.usize(..5)],
        policy: policies[random.usize(..policies.len())],
        write: writes[random.usize(..writes.len())],
        placement: if seed % 4 == 3 { PlacementRule::Reads } else { PlacementRule::Worth },
        capacity_chunks: random.bool().then(|| random.u64(8..24)),
        has_disk: random.u8(..5) > 0,
        has_objects: random.bool(),
    }
}

fn live(world: &mut World) {
    for second in 1..=FAULTS_STOP.as_secs() {
        world.run_until(Duration::from_secs(second));
        world.check_deadlines();
    }
    world.end_faults();
    for host in 0..world.settings.nodes {
        world.start_process(host);
    }
    world.run_until(FAULTS_STOP + Duration::from_secs(4));
    world.is_busy = false;
    world.run_until(BUSY);
    world.check_deadlines();
    for engine in 0..world.engines.len() {
        if world.engines[engine].waiting() > 0 && world.violation.is_none() {
            world.check_waiting(engine, Duration::from_secs(12));
        }
        world.engine_dies(engine);
    }
    world.engines.iter_mut().for_each(crate::engine::Engine::end);
    let bound = BUSY + BOUND;
    let mut until = BUSY;
    while world.violation.is_none() && until < bound {
        // Never at a time when the seconds of all clocks meet: nodes do something then.
        until += Duration::from_millis(1_037);
        world.run_until(until);
        let is_over = until > BUSY + Duration::from_secs(12);
        if is_over && world.rows_that_differ().is_none() && !world.asks_peers() {
            break;
        }
    }
    if let Some(differs) = world.rows_that_differ() {
        world.violate(|| format!("the directory is not what is held: {differs}"));
    }
    world.check_rest();
}

const FAULTS_STOP: Duration = Duration::from_secs(50);

/// Until this time engines send new requests, and all requests are answered.
const BUSY: Duration = Duration::from_secs(66);

/// Time after the last fault within which the directory must be right.
const BOUND: Duration = Duration::from_secs(40);

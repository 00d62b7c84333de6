//! Scenarios `mixed` and `faults`: engines of two tenants at every node of a cluster that is broken on purpose.

use std::rc::Rc;
use std::sync::Arc;

use futures_util::future::join_all;
use tokio::sync::Mutex;

use super::SoakRun;
use super::chaos::{Chaos, Handle};
use super::engine::{Engine, IN_FLIGHT};
use super::faults::Faults;
use super::nodes::Node;
use super::options::Scenario;
use super::report::Verdict;
use super::space::Space;

/// Runs the scenario for its time.
pub(super) async fn run(run: &SoakRun) -> anyhow::Result<Vec<Verdict>> {
    let options = &run.options;
    let bytes = TIMES_MEMORY * u64::from(options.nodes) * (options.arena_mib << 20);
    let spaces = Rc::new(Space::all(options.seed, TENANTS.len(), bytes));
    let mut faults = match options.scenario {
        Scenario::Faults => Some(Faults::prepare(run)?),
        _ => None,
    };
    let chaos = Chaos::new(run, faults.as_ref().map(Faults::plan).unwrap_or_default());
    let mut cluster = Handle::start(chaos).await?;
    if let Some(faults) = &mut faults {
        faults.begin(run, cluster.cluster())?;
    }
    let working = join_all(engines(run, &spaces, &cluster.cluster().nodes));
    let time = options.time().unwrap_or_default().saturating_sub(run.tally.elapsed());
    // Dropping the engines here ends their sessions before the nodes end.
    let _ = tokio::time::timeout(time, working).await;
    let verdicts = faults.map_or_else(Vec::new, Faults::end);
    cluster.end().await?;
    Ok(verdicts)
}

/// The work of all engines.
fn engines(
    run: &SoakRun,
    spaces: &Rc<Vec<Space>>,
    nodes: &[Arc<Node>],
) -> Vec<impl Future<Output = ()> + use<>> {
    let mut rng = fastrand::Rng::with_seed(run.options.seed);
    let mut working = Vec::new();
    for node in nodes {
        for tenant in 0..TENANTS.len() {
            let engine = Rc::new(Engine {
                node: Arc::clone(node),
                tenant,
                spaces: Rc::clone(spaces),
                tally: Arc::clone(&run.tally),
                open: Mutex::default(),
            });
            for _ in 0..IN_FLIGHT {
                let (engine, rng) = (Rc::clone(&engine), rng.fork());
                working.push(async move { engine.work(rng).await });
            }
        }
    }
    working
}

/// The tenants of the nodes.
pub(super) const TENANTS: [&str; 2] = ["red", "blue"];

/// The ratio of the bytes that engines use to the nodes' memory.
const TIMES_MEMORY: u64 = 10;

//! The faults that scenario `faults` adds to `mixed`.

mod drive;
mod samples;
mod store;
mod strangers;

use std::time::Duration;

use larder_net::quic::Credentials;
use larder_net::quic::ca::Validity;
use larder_protocol::identity::{Identity, Role};

use self::samples::Samples;
use self::store::HangingStore;
use self::strangers::Strangers;
use super::SoakRun;
use super::chaos::{Cluster, DISK_TIMES, NodePlan, Plan};
use super::report::Verdict;

/// The faults that do not come from the cluster's own processes.
pub(super) struct Faults {
    plan: Plan,
    is_long: bool,
    samples: Option<Samples>,
    strangers: Option<Strangers>,
    // Last: nodes end before the store that they use.
    _store: HangingStore,
}

impl Faults {
    /// Prepares the faults that the nodes' configuration needs. Leaves out what this machine lacks, and says so.
    pub(super) fn prepare(run: &SoakRun) -> anyhow::Result<Self> {
        let store = HangingStore::start(HANGING)?;
        if !store.is_real() {
            let why = "no moto_server here: the object store always hangs".to_owned();
            run.tally.count(|counts| counts.left_out.push(why));
        }
        let mut rng = fastrand::Rng::with_seed(run.options.seed.wrapping_add(2));
        let mut nodes = vec![NodePlan::default(); usize::from(run.options.nodes)];
        for plan in &mut nodes {
            plan.config = store.config();
        }
        let bytes = DISK_TIMES * (run.options.arena_mib << 20);
        match drive::environment(&run.folder, &mut rng, bytes) {
            Ok(environment) => nodes[BAD_DRIVE].environment = environment,
            Err(error) => run.tally.count(|counts| counts.left_out.push(format!("read errors: {error:#}"))),
        }
        let is_long = run.options.time().is_some_and(|time| time >= LONG);
        let plan = Plan { stops_and_clones: true, nodes };
        Ok(Self { plan, is_long, samples: None, strangers: None, _store: store })
    }

    pub(super) fn plan(&self) -> Plan {
        self.plan.clone()
    }

    /// Begins the other faults, once the cluster is up.
    pub(super) fn begin(&mut self, run: &SoakRun, cluster: &Cluster) -> anyhow::Result<()> {
        let issued = cluster.authority.issue(&Identity::new(Role::Admin, "stranger"), Validity::days(1))?;
        let ca = cluster.authority.certificate_pem().as_bytes();
        let credentials =
            Credentials::from_pem(ca, issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes())?;
        self.samples = Some(Samples::start(&cluster.nodes, &cluster.coordinator)?);
        let seed = run.options.seed.wrapping_add(3);
        self.strangers =
            Some(Strangers::start(&cluster.nodes, &cluster.coordinator, credentials, seed, &run.tally)?);
        Ok(())
    }

    pub(super) fn end(self) -> Vec<Verdict> {
        drop(self.strangers);
        self.samples.map_or_else(Vec::new, |samples| samples.end(self.is_long))
    }
}

/// The node whose drive has sectors that cannot be read.
const BAD_DRIVE: usize = 1;

/// How long the object store hangs, and how long it serves in between.
const HANGING: Duration = Duration::from_secs(12);

/// The length from which on a run shows growth.
const LONG: Duration = Duration::from_secs(300);

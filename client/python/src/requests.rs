//! The requests of a session, made of what Python passed: the same for threads and for event loops.

use std::future::Future;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use larder_client::{FollowOptions, LookupOptions, SessionError, SessionOptions, UnknownVerify};
use larder_protocol::session::{Tier, Wait};
use larder_protocol::{NamespaceSpec, PoolSet};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::runtime::Handle;

use crate::answers::{Found, Pinned, Progress};
use crate::handoff::{Follow, InPlace, StagedLayers};
use crate::lease::Lease;
use crate::namespace::{Chain, Namespace, SpecFields};
use crate::process::{Own, runtime};
use crate::reservation::{Reservation, StagedChunk};
use crate::ticket::Ticket;

/// An open session and the runtime that it lives on.
pub(crate) struct Requests {
    session: Own<larder_client::Session>,
    runtime: Handle,
}

/// How to open a session.
pub(crate) struct Opening {
    pub(crate) path: PathBuf,
    pub(crate) client: Option<String>,
    pub(crate) device: Option<u16>,
    pub(crate) window_bytes: u64,
    pub(crate) timeout: f64,
    pub(crate) verify: String,
    pub(crate) verify_seed: Option<u64>,
}

/// What a reservation may say besides the chain.
pub(crate) struct Reserving {
    pub(crate) priority: i8,
    pub(crate) attempt: u64,
    /// By position in the chain, the pools that will be written; all where not given.
    pub(crate) pools: Option<Vec<Vec<usize>>>,
}

/// What a lookup and a prefetch may ask besides the chain.
pub(crate) struct Asking {
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) skip_read: bool,
    pub(crate) preempted: bool,
    pub(crate) tiers: Vec<String>,
    pub(crate) pin_seconds: Option<f64>,
    pub(crate) prefill_tokens_per_second: Option<f64>,
}

/// Whom to follow.
pub(crate) struct Following {
    pub(crate) node: Option<String>,
    pub(crate) device: u16,
    pub(crate) attempt: u64,
    pub(crate) patience: f64,
}

/// How long to wait for a prefetch: "complete", "best_effort", or seconds.
#[derive(FromPyObject)]
pub(crate) enum Patience {
    #[pyo3(transparent, annotation = "float")]
    Seconds(f64),
    #[pyo3(transparent, annotation = "str")]
    Word(String),
}

/// A request that is on its way once it is polled.
pub(crate) trait Request<T>: Future<Output = Result<T, SessionError>> + Send + 'static {}

impl<T, F: Future<Output = Result<T, SessionError>> + Send + 'static> Request<T> for F {}

impl Opening {
    /// The runtime, and the session that opens on it.
    ///
    /// # Errors
    /// `ValueError` for an impossible timeout or `verify`; `OSError` where the system gives no thread.
    pub(crate) fn start(self) -> PyResult<(Handle, impl Request<larder_client::Session>)> {
        let options = SessionOptions {
            client: self.client.unwrap_or_else(|| concat!("larder-kv ", env!("CARGO_PKG_VERSION")).into()),
            device: self.device,
            window_bytes: self.window_bytes,
            timeout: seconds(self.timeout)?,
            verify: self
                .verify
                .parse()
                .map_err(|error: UnknownVerify| PyValueError::new_err(error.to_string()))?,
            verify_seed: self.verify_seed,
        };
        let path = self.path;
        Ok((runtime()?, async move { larder_client::Session::connect(path, options).await }))
    }
}

impl Requests {
    pub(crate) fn new(session: larder_client::Session, runtime: Handle) -> Self {
        Self { session: Own::new(session), runtime }
    }

    /// # Errors
    /// `ForkedError` in another process than the one that opened the session.
    pub(crate) fn session(&self) -> PyResult<&larder_client::Session> {
        self.session.get()
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(crate) fn register(&self, spec: SpecFields, slices: Vec<u16>) -> PyResult<impl Request<Namespace>> {
        let (spec, block_bytes): (NamespaceSpec, _) = spec.resolve()?;
        let session = self.session()?.clone();
        Ok(async move {
            let inner = session.register(&spec, &slices, &block_bytes).await?;
            Ok(Namespace { inner })
        })
    }

    pub(crate) fn lookup(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        asking: Asking,
    ) -> PyResult<impl Request<Found>> {
        let options = asking.options(namespace, chain)?;
        let (session, namespace, chain) = self.with(namespace, chain)?;
        Ok(async move { Ok((&session.lookup(&namespace, &chain, options).await?).into()) })
    }

    pub(crate) fn prefetch(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        asking: Asking,
    ) -> PyResult<impl Request<Ticket>> {
        let options = asking.options(namespace, chain)?;
        let (session, namespace, chain) = self.with(namespace, chain)?;
        Ok(async move {
            let ticket = session.prefetch(&namespace, &chain, options).await?;
            Ok(Ticket::new(ticket))
        })
    }

    pub(crate) fn progress(&self, ticket: &Ticket) -> PyResult<impl Request<Progress>> {
        let (session, ticket) = (self.session()?.clone(), ticket.share()?);
        Ok(async move { Ok(session.progress(&ticket).await?.into()) })
    }

    pub(crate) fn collect(&self, ticket: &Ticket, wait: Patience) -> PyResult<impl Request<Lease>> {
        let wait = wait.resolve()?;
        let (session, ticket) = (self.session()?.clone(), ticket.take()?);
        Ok(async move { Ok(Lease::new(session.collect(ticket, wait).await?)) })
    }

    pub(crate) fn lease(&self, namespace: &Namespace, chain: &Chain) -> PyResult<impl Request<Lease>> {
        let (session, namespace, chain) = self.with(namespace, chain)?;
        Ok(async move { Ok(Lease::new(session.lease(&namespace, &chain).await?)) })
    }

    pub(crate) fn reserve(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        Reserving { priority, attempt, pools }: Reserving,
    ) -> PyResult<impl Request<Reservation>> {
        let (session, namespace, chain) = self.with(namespace, chain)?;
        let pools = pools.map(|pools| pool_sets(&namespace, &pools)).transpose()?;
        if pools.is_some() && attempt != 0 {
            return Err(PyValueError::new_err("a hand-over is of all pools of its chunks"));
        }
        Ok(async move {
            let reserved = match pools {
                Some(pools) => session.reserve_pools(&namespace, &chain, &pools, priority).await?,
                None => session.reserve_attempt(&namespace, &chain, priority, attempt).await?,
            };
            Ok(Reservation::new(reserved))
        })
    }

    pub(crate) fn stage_layers(
        &self,
        reservation: &Reservation,
        positions: Vec<u32>,
        layers: Range<u32>,
        pool: usize,
    ) -> PyResult<impl Request<StagedLayers>> {
        let (session, reservation) = (self.session()?.clone(), reservation.share()?);
        check_reserved(&reservation, &positions)?;
        let known = reservation.namespace().pool_layers().get(pool).copied().unwrap_or(0);
        if layers.start >= layers.end || layers.end > known {
            let text = format!("pool {pool} has {known} layers, not {layers:?}");
            return Err(PyValueError::new_err(text));
        }
        Ok(async move {
            Ok(StagedLayers::new(session.stage_layers(&reservation, &positions, pool, layers).await?))
        })
    }

    pub(crate) fn hand_over(&self, staged: &StagedLayers) -> PyResult<impl Request<()>> {
        let (session, staged) = (self.session()?.clone(), staged.take()?);
        Ok(async move { session.hand_over(staged).await })
    }

    pub(crate) fn commit_handed_over(
        &self,
        reservation: &Reservation,
        positions: Vec<u32>,
    ) -> PyResult<impl Request<u32>> {
        let (session, reservation) = (self.session()?.clone(), reservation.share()?);
        check_reserved(&reservation, &positions)?;
        Ok(async move { session.commit_handed_over(&reservation, &positions).await })
    }

    pub(crate) fn follow(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        Following { node, device, attempt, patience }: Following,
    ) -> PyResult<impl Request<Follow>> {
        let writer = node.map(|node| (node, device));
        let options = FollowOptions { writer, attempt, patience: seconds(patience)? };
        let (session, namespace, chain) = self.with(namespace, chain)?;
        Ok(async move { Ok(Follow::new(session.follow(&namespace, &chain, options).await?)) })
    }

    pub(crate) fn wait_for_layers(
        &self,
        follow: &Follow,
        layers: u32,
        patience: f64,
    ) -> PyResult<impl Request<InPlace>> {
        let (session, follow, patience) = (self.session()?.clone(), follow.share()?, seconds(patience)?);
        Ok(async move { Ok(session.wait_for_layers(&follow, layers, patience).await?.into()) })
    }

    pub(crate) fn stage(
        &self,
        reservation: &Reservation,
        position: u32,
    ) -> PyResult<impl Request<StagedChunk>> {
        let (session, reservation) = (self.session()?.clone(), reservation.share_for(position)?);
        Ok(async move {
            let staged = session.stage(&reservation, position).await?;
            Ok(StagedChunk::new(reservation, staged))
        })
    }

    pub(crate) fn commit(
        &self,
        reservation: &Reservation,
        staged: &[PyRef<'_, StagedChunk>],
    ) -> PyResult<impl Request<u32>> {
        let (session, reservation) = (self.session()?.clone(), reservation.share()?);
        let staged = staged.iter().map(|staged| staged.take(&reservation)).collect::<PyResult<Vec<_>>>()?;
        Ok(async move { session.commit(&reservation, staged).await })
    }

    pub(crate) fn pin(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        duration: f64,
    ) -> PyResult<impl Request<Pinned>> {
        let duration = seconds(duration)?;
        let (session, namespace, chain) = self.with(namespace, chain)?;
        Ok(async move { Ok(session.pin(&namespace, &chain, duration).await?.into()) })
    }

    pub(crate) fn unpin(&self, pin: u64) -> PyResult<impl Request<()>> {
        let session = self.session()?.clone();
        Ok(async move { session.unpin(pin).await })
    }

    fn with(
        &self,
        namespace: &Namespace,
        chain: &Chain,
    ) -> PyResult<(larder_client::Session, larder_client::Namespace, larder_protocol::Chain)> {
        Ok((self.session()?.clone(), namespace.inner.clone(), chain.inner.clone()))
    }
}

impl Asking {
    fn options(self, namespace: &Namespace, chain: &Chain) -> PyResult<LookupOptions> {
        // Without a prompt's length, all chunks of the chain may be found.
        let all = chain.inner.len() as u64 * u64::from(namespace.inner.chunk_tokens()) + 1;
        let tiers = self.tiers.iter().map(|tier| match tier.as_str() {
            "device" => Ok(Tier::Device),
            "host" => Ok(Tier::Host),
            "disk" => Ok(Tier::Disk),
            "peer" => Ok(Tier::Peer),
            "object" => Ok(Tier::Object),
            _ => Err(PyValueError::new_err(format!(
                "a tier is \"host\", \"disk\", \"peer\" or \"object\", not {tier:?}"
            ))),
        });
        Ok(LookupOptions {
            prompt_tokens: self.prompt_tokens.unwrap_or(all),
            skip_read: self.skip_read,
            preempted: self.preempted,
            tiers: tiers.collect::<PyResult<_>>()?,
            pin: self.pin_seconds.map(seconds).transpose()?,
            prefill_tokens_per_second: self.prefill_tokens_per_second,
        })
    }
}

impl Patience {
    fn resolve(self) -> PyResult<Wait> {
        match self {
            Self::Seconds(patience) => {
                Ok(Wait::TimeoutMs(u64::try_from(seconds(patience)?.as_millis()).unwrap_or(u64::MAX)))
            }
            Self::Word(word) if word == "complete" => Ok(Wait::Complete),
            Self::Word(word) if word == "best_effort" => Ok(Wait::BestEffort),
            Self::Word(word) => {
                let text = format!("wait is \"complete\", \"best_effort\" or seconds, not {word:?}");
                Err(PyValueError::new_err(text))
            }
        }
    }
}

pub(crate) fn check_reserved(reservation: &larder_client::Reservation, positions: &[u32]) -> PyResult<()> {
    let is_reserved = |position: &&u32| reservation.chunks().binary_search(position).is_err();
    match positions.iter().find(is_reserved) {
        Some(position) => Err(PyValueError::new_err(format!("the chunk at {position} is not reserved"))),
        None => Ok(()),
    }
}

/// # Errors
/// `ValueError` where a chunk of the namespace has no such pool.
fn pool_sets(namespace: &larder_client::Namespace, pools: &[Vec<usize>]) -> PyResult<Vec<PoolSet>> {
    let known = namespace.pool_layers().len();
    let set = |pools: &Vec<usize>| match pools.iter().find(|&&pool| pool >= known) {
        Some(pool) => {
            Err(PyValueError::new_err(format!("the namespace has {known} pools, there is no pool {pool}")))
        }
        None => Ok(pools.iter().fold(PoolSet::default(), |set, &pool| set.with(pool))),
    };
    pools.iter().map(set).collect()
}

pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| PyValueError::new_err(format!("{seconds} seconds: {error}")))
}

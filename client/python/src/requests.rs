//! Turns Python's arguments into requests, and results into Python's values.

use std::collections::HashSet;
use std::future::{Future, IntoFuture as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use larder_client::{Call, LookupOptions, Session, SessionError};
use larder_protocol::PoolSet;
use larder_protocol::session::{Tier, Wait};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::runtime::Handle;

use crate::namespace::{Chain, Namespace};
use crate::process::Own;

/// The arguments of a lookup or prefetch besides the chain.
#[derive(Default)]
pub(crate) struct Asking {
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) skip_read: bool,
    pub(crate) preempted: bool,
    pub(crate) tiers: Vec<String>,
    pub(crate) pin_seconds: Option<f64>,
    pub(crate) prefill_tokens_per_second: Option<f64>,
}

/// How long to wait for a prefetch: "complete", "best_effort", or seconds.
#[derive(FromPyObject)]
pub(crate) enum Patience {
    #[pyo3(transparent, annotation = "float")]
    Seconds(f64),
    #[pyo3(transparent, annotation = "str")]
    Word(String),
}

/// A request that is sent when it is first polled, with a result for Python.
pub(crate) trait Request<T>: Future<Output = Result<Reply<T>, SessionError>> + Send + 'static {}

impl<T, F: Future<Output = Result<Reply<T>, SessionError>> + Send + 'static> Request<T> for F {}

/// A result that its caller has not got yet.
pub(crate) struct Reply<T> {
    pub(crate) value: T,
    /// The pin that the result names, if there is one. The result's other grants are given back when it is dropped.
    pub(crate) pin: Option<Own<PinOnTheWay>>,
}

/// A pin that ends when this is dropped, unless it was kept.
pub(crate) struct PinOnTheWay {
    session: Session,
    runtime: Handle,
    /// The pin's number; 0 once the caller has it.
    pin: AtomicU64,
}

/// The request of a call; `make` turns its result into Python's.
pub(crate) fn then<T: Send + 'static, U>(
    call: Call<T>,
    make: impl FnOnce(T) -> U + Send + 'static,
) -> PyResult<impl Request<U>> {
    Ok(async move { call.await.map(make).map(Reply::from) })
}

/// As [`then`], for a call whose result may have a pin: `pin` finds the pin's number, 0 if there is none.
pub(crate) fn then_pinned<T: Send + 'static, U>(
    session: Session,
    call: Call<T>,
    pin: fn(&T) -> u64,
    make: impl FnOnce(T) -> U + Send + 'static,
) -> PyResult<impl Request<U>> {
    Ok(async move {
        let result = call.await?;
        let pin = Some(pin(&result)).filter(|&pin| pin != 0);
        let unkept =
            |pin| Own::new(PinOnTheWay { session, runtime: Handle::current(), pin: AtomicU64::new(pin) });
        Ok(Reply { pin: pin.map(unkept), value: make(result) })
    })
}

impl<T> Reply<T> {
    /// The result; its pin is the caller's from now on.
    pub(crate) fn keep(self) -> T {
        // Never an error: no other process has the result.
        self.pin.iter().filter_map(|pin| pin.get().ok()).for_each(PinOnTheWay::keep);
        self.value
    }
}

impl<T> From<T> for Reply<T> {
    fn from(value: T) -> Self {
        Self { value, pin: None }
    }
}

impl PinOnTheWay {
    /// Leaves the pin to the caller.
    pub(crate) fn keep(&self) {
        self.pin.store(0, Ordering::Relaxed);
    }
}

impl Drop for PinOnTheWay {
    fn drop(&mut self) {
        let pin = *self.pin.get_mut();
        if pin != 0 {
            self.runtime.spawn(self.session.unpin(pin).into_future());
        }
    }
}

impl Asking {
    pub(crate) fn options(self, namespace: &Namespace, chain: &Chain) -> PyResult<LookupOptions> {
        // Without a prompt's length, all chunks of the chain may be found.
        let all = chain.inner.len() as u64 * u64::from(namespace.inner.chunk_tokens()) + 1;
        let tiers = self.tiers.iter().map(|tier| match tier.as_str() {
            "device" => Ok(Tier::Device),
            "host" => Ok(Tier::Host),
            "disk" => Ok(Tier::Disk),
            "peer" => Ok(Tier::Peer),
            "object" => Ok(Tier::Object),
            _ => Err(PyValueError::new_err(format!(
                "a tier is \"device\", \"host\", \"disk\", \"peer\" or \"object\", not {tier:?}"
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
    pub(crate) fn resolve(self) -> PyResult<Wait> {
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
    let mut seen = HashSet::new();
    for position in positions {
        if reservation.chunks().binary_search(position).is_err() {
            return Err(PyValueError::new_err(format!("the chunk at {position} is not reserved")));
        }
        if !seen.insert(position) {
            return Err(PyValueError::new_err(format!("the chunk at {position} is named twice")));
        }
    }
    Ok(())
}

/// # Errors
/// `ValueError` if one of these reserved chunks does not write `pool`.
pub(crate) fn check_written(
    reservation: &larder_client::Reservation,
    positions: &[u32],
    pool: usize,
) -> PyResult<()> {
    let mut reserved = reservation.chunks().iter().zip(reservation.pools());
    match reserved.find(|(chunk, pools)| positions.contains(chunk) && !pools.has(pool)) {
        Some((chunk, _)) => {
            Err(PyValueError::new_err(format!("pool {pool} of the chunk at {chunk} is not to be written")))
        }
        None => Ok(()),
    }
}

/// # Errors
/// `ValueError` if a chunk of the namespace has no such pool.
pub(crate) fn pool_sets(
    namespace: &larder_client::Namespace,
    pools: &[Vec<usize>],
) -> PyResult<Vec<PoolSet>> {
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

//! The options of sessions and lookups.

use std::num::NonZero;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use larder_protocol::session::Tier;

/// How to open a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionOptions {
    /// The client's name and version, for the node's log.
    pub client: String,
    /// Number of the GPU actor to talk to; if `None`, the actor with the fewest sessions.
    pub device: Option<u16>,
    /// Requested bytes of write window; 0 for a session that never writes. The node may give less. Room for two or three chunks
    /// (all slices and pools of the session) is enough to overlap copying and committing.
    pub window_bytes: u64,
    /// Time limit of a request, from its sending to its result. `Duration::MAX` is no limit. To collect a ticket takes longer by the
    /// time for which the caller waits, or for [`Wait::Complete`](larder_protocol::session::Wait::Complete) twice as long at most.
    /// While the node allows no more outstanding requests, a call waits for others first, for this time at most.
    pub timeout: Duration,
    /// Which blocks are verified as they are read.
    pub verify: Verify,
    /// The seed by which [`Verify::Sample`] chooses blocks; a random seed if `None`.
    pub verify_seed: Option<u64>,
    /// Threads that copy many bytes out of blocks ([`LeaseGuard::copy_parts`](crate::LeaseGuard::copy_parts)), the calling thread
    /// among them, at most 64; 0 for half of the CPUs that the process may use, at most 4. The threads exist as long as the copy.
    pub copy_threads: usize,
}

/// Which blocks a session verifies as it reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Verify {
    /// No block is verified.
    Off,
    /// One block in 64 is verified, chosen at random: memory that damages many blocks is found, a single damaged block most
    /// likely not.
    #[default]
    Sample,
    /// Every block is verified: no byte of another block is ever read.
    Always,
}

/// A word that is none of "off", "sample" and "always".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`verify` is \"off\", \"sample\" or \"always\", not {0:?}")]
pub struct UnknownVerify(String);

/// The options of a lookup.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LookupOptions {
    /// Tokens of the whole prompt: the answer leaves at least one of them to compute.
    pub prompt_tokens: u64,
    /// The caller cannot use a hit (prompt log-probabilities, pooling): the answer is zero, and the lookup is counted separately.
    pub skip_read: bool,
    /// The request had been preempted before; its lookup is counted separately.
    pub preempted: bool,
    /// Tiers to look in; all tiers if empty.
    pub tiers: Vec<Tier>,
    /// Pin the found chunks for this time.
    pub pin: Option<Duration>,
    /// Tokens that the engine computes in a second. If it is given, a prefetch brings only chunks that come sooner than the
    /// engine computes them, and the node counts the seconds of prefill that a hit saves.
    pub prefill_tokens_per_second: Option<f64>,
}

impl FromStr for Verify {
    type Err = UnknownVerify;

    fn from_str(word: &str) -> Result<Self, UnknownVerify> {
        match word {
            "off" => Ok(Self::Off),
            "sample" => Ok(Self::Sample),
            "always" => Ok(Self::Always),
            _ => Err(UnknownVerify(word.to_owned())),
        }
    }
}

impl SessionOptions {
    /// Threads that copy at once: at least one. Without a number, half of the CPUs do: several engines share a host's memory.
    pub(crate) fn threads_that_copy(&self) -> usize {
        match self.copy_threads {
            0 => (thread::available_parallelism().map_or(1, NonZero::get) / 2).clamp(1, MOST_BY_DEFAULT),
            asked => asked.min(MOST_COPY_THREADS),
        }
    }
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            client: concat!("larder-client ", env!("CARGO_PKG_VERSION")).into(),
            device: None,
            window_bytes: 64 << 20,
            timeout: Duration::from_secs(10),
            verify: Verify::default(),
            verify_seed: None,
            copy_threads: 0,
        }
    }
}

/// The threads that share a copy of so many bytes, where at most `threads` may: at least one.
pub(crate) fn threads_for(threads: usize, bytes: u64) -> usize {
    threads.min(usize::try_from(bytes / BYTES_A_THREAD).unwrap_or(usize::MAX)).max(1)
}

/// A time that can be added to any instant; a longer one has no end for any caller.
pub(crate) fn bounded(duration: Duration) -> Duration {
    duration.min(LONGEST)
}

/// Whole milliseconds, as messages carry them.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A hundred years.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);

const MOST_BY_DEFAULT: usize = 4;
const MOST_COPY_THREADS: usize = 64;

/// A further thread pays off from this number of bytes on. Starting it takes about 30 us, and copying as many bytes 100 us.
const BYTES_A_THREAD: u64 = 2 << 20;

//! What callers choose.

use std::str::FromStr;
use std::time::Duration;

use larder_protocol::session::Tier;

/// How to open a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionOptions {
    /// Who asks, for the node's log: name and version.
    pub client: String,
    /// Number of the GPU actor to talk to; the one with the fewest sessions where `None`.
    pub device: Option<u16>,
    /// Bytes of write window wanted; 0 for a session that never writes. The node may give less. Two or three chunks (all
    /// slices and pools of the session) keep copying and committing overlapped.
    pub window_bytes: u64,
    /// How long a request may take, from the call to its result.
    pub timeout: Duration,
    /// Which blocks are verified as they are read.
    pub verify: Verify,
    /// Decides, with [`Verify::Sample`], which they are; at random where `None`.
    pub verify_seed: Option<u64>,
}

/// Which blocks a session verifies as it reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Verify {
    /// None.
    Off,
    /// One in 64, chosen at random: a memory that damages blocks is found, a single damaged block most likely not.
    #[default]
    Sample,
    /// All of them: no byte is read as that of another block.
    Always,
}

/// A word that is none of "off", "sample" and "always".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`verify` is \"off\", \"sample\" or \"always\", not {0:?}")]
pub struct UnknownVerify(String);

/// What to ask of a lookup besides the chain.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LookupOptions {
    /// Tokens of the whole prompt: the answer leaves at least one of them to compute.
    pub prompt_tokens: u64,
    /// The caller cannot use a hit (prompt log-probabilities, pooling): the answer is zero and is counted apart.
    pub skip_read: bool,
    /// The request had been preempted before; counted apart.
    pub preempted: bool,
    /// Tiers to look in; all where empty.
    pub tiers: Vec<Tier>,
    /// Pin what is found for so long.
    pub pin: Option<Duration>,
    /// Tokens that the engine computes in a second. Where it is given, a prefetch brings only what comes sooner than it is
    /// computed, and the node counts the seconds of prefill that a hit saves.
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

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            client: concat!("larder-client ", env!("CARGO_PKG_VERSION")).into(),
            device: None,
            window_bytes: 64 << 20,
            timeout: Duration::from_secs(10),
            verify: Verify::default(),
            verify_seed: None,
        }
    }
}

/// Whole milliseconds, as messages carry them.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

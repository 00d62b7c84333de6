//! Load or recompute: measures each source, and decides how much of a prefix is worth waiting for.
//!
//! Loading the first `k` chunks takes as long as its slowest source needs for its queue and for these chunks. The engine
//! computes the other chunks afterwards, at its own speed. The `k` with the least total time is loaded. A source is measured
//! only while it has something to do. A source that was never measured is tried.

use std::time::Duration;

/// The rate of a source, measured while the source has something to do.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Meter {
    bytes_per_second: Option<f64>,
    /// Bytes that were ordered and not delivered.
    outstanding_bytes: u64,
    /// Bytes that were delivered since `since`, in a time too short to measure.
    unmeasured_bytes: u64,
    since: Duration,
}

/// One chunk of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSource {
    /// Position of its source among the meters; `None` if it is in place.
    pub source: Option<usize>,
    /// Its size.
    pub bytes: u64,
}

/// The engine's speed of computing chunks itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prefill {
    /// Tokens that it computes in a second.
    pub tokens_per_second: f64,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
}

impl Meter {
    /// Notes that bytes were ordered.
    pub fn ordered(&mut self, bytes: u64, now: Duration) {
        if self.outstanding_bytes == 0 {
            (self.since, self.unmeasured_bytes) = (now, 0);
        }
        self.outstanding_bytes += bytes;
    }

    /// Notes that ordered bytes have come.
    pub fn delivered(&mut self, bytes: u64, now: Duration) {
        self.outstanding_bytes = self.outstanding_bytes.saturating_sub(bytes);
        self.unmeasured_bytes += bytes;
        let took = now.saturating_sub(self.since);
        // For a source that was never measured, any sample is better than none.
        let is_first = self.bytes_per_second.is_none() && self.outstanding_bytes == 0;
        if took < SHORTEST_SAMPLE && !is_first {
            return;
        }
        let took = took.max(SHORTEST_TIME).as_secs_f64();
        let rate = self.unmeasured_bytes as f64 / took;
        // The longer a sample, the more it says.
        let weight = (took / MEMORY.as_secs_f64()).clamp(LEAST_WEIGHT, 1.0);
        self.bytes_per_second =
            Some(self.bytes_per_second.map_or(rate, |known| known + weight * (rate - known)));
        (self.since, self.unmeasured_bytes) = (now, 0);
    }

    /// Notes that ordered bytes will not come.
    pub fn gave_up(&mut self, bytes: u64) {
        self.outstanding_bytes = self.outstanding_bytes.saturating_sub(bytes);
    }

    /// The source's rate; `None` before its first delivery.
    #[must_use]
    pub fn bytes_per_second(&self) -> Option<f64> {
        self.bytes_per_second
    }

    /// Seconds until the source has delivered `bytes` more bytes. A source that was never measured counts as fast, so that it
    /// is tried and measured.
    #[must_use]
    pub fn seconds_for(&self, bytes: u64) -> f64 {
        let all = (self.outstanding_bytes + bytes) as f64;
        self.bytes_per_second.map_or(0.0, |rate| all / rate.max(1.0))
    }
}

/// The number of chunks that are worth loading: at least those in place at the front.
#[must_use]
pub fn worth_loading(pieces: &[ChunkSource], meters: &[&Meter], prefill: Prefill) -> usize {
    let Prefill { tokens_per_second, chunk_tokens } = prefill;
    let chunk_seconds = f64::from(chunk_tokens) / tokens_per_second.max(f64::MIN_POSITIVE);
    let mut bytes = vec![0; meters.len()];
    let mut slowest: f64 = 0.0;
    let (mut best, mut least) = (0, f64::INFINITY);
    for loaded in 0..=pieces.len() {
        if let Some(ChunkSource { source: Some(source), bytes: more }) =
            loaded.checked_sub(1).map(|last| pieces[last])
        {
            bytes[source] += more;
            slowest = slowest.max(meters[source].seconds_for(bytes[source]));
        }
        let seconds = slowest + (pieces.len() - loaded) as f64 * chunk_seconds;
        if seconds <= least {
            (best, least) = (loaded, seconds);
        }
    }
    best
}

/// Deliveries within less than this are measured together.
const SHORTEST_SAMPLE: Duration = Duration::from_millis(1);

/// The shortest time of a delivery.
const SHORTEST_TIME: Duration = Duration::from_micros(1);

/// A sample of this length replaces the known rate.
const MEMORY: Duration = Duration::from_secs(1);

/// The least weight of a sample.
const LEAST_WEIGHT: f64 = 0.05;

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn metered(bytes_per_second: u64) -> Meter {
        let mut meter = Meter::default();
        meter.ordered(bytes_per_second, Duration::ZERO);
        meter.delivered(bytes_per_second, Duration::from_secs(1));
        meter
    }

    fn from(source: usize, chunks: usize) -> Vec<ChunkSource> {
        vec![ChunkSource { source: Some(source), bytes: 4 * MIB }; chunks]
    }

    fn prefill(tokens_per_second: f64) -> Prefill {
        Prefill { tokens_per_second, chunk_tokens: 256 }
    }

    #[test]
    fn a_source_is_measured_by_what_it_delivers_while_it_has_something_to_do() {
        let mut meter = metered(100 * MIB);
        assert_eq!(meter.bytes_per_second(), Some((100 * MIB) as f64));
        // Idle for a long time, which says nothing; then half as fast for a while.
        meter.ordered(50 * MIB, Duration::from_secs(100));
        meter.delivered(50 * MIB, Duration::from_secs(101));
        assert_eq!(meter.bytes_per_second(), Some((50 * MIB) as f64));
        let moment = Duration::from_micros(10);
        meter.ordered(2 * MIB, Duration::from_secs(200));
        meter.delivered(MIB, Duration::from_secs(200) + moment);
        assert_eq!(meter.bytes_per_second(), Some((50 * MIB) as f64), "too short to say anything");
        meter.gave_up(MIB);
        assert_eq!(meter.seconds_for(50 * MIB), 1.0);
    }

    #[test]
    fn a_first_delivery_is_measured_however_soon_it_is_over() {
        let mut meter = Meter::default();
        meter.ordered(2 * MIB, Duration::ZERO);
        meter.delivered(MIB, Duration::from_micros(100));
        assert_eq!(meter.bytes_per_second(), None, "more is about to come");
        meter.delivered(MIB, Duration::from_micros(200));
        assert_eq!(meter.bytes_per_second(), Some((2 * MIB) as f64 / 200e-6));
        let mut meter = Meter::default();
        meter.ordered(MIB, Duration::ZERO);
        meter.delivered(MIB, Duration::ZERO);
        assert!(meter.bytes_per_second().is_some_and(f64::is_finite), "sooner than the clock ticks");
    }

    #[test]
    fn the_choice_flips_where_the_arithmetic_says() {
        // 4 MiB at 100 MiB/s take 40 ms; 256 tokens take as long at 6,400 tokens a second.
        let peer = metered(100 * MIB);
        assert_eq!(worth_loading(&from(0, 10), &[&peer], prefill(6_300.0)), 10);
        assert_eq!(worth_loading(&from(0, 10), &[&peer], prefill(6_500.0)), 0);
    }

    #[test]
    fn what_waits_before_is_counted() {
        let mut peer = metered(100 * MIB);
        assert_eq!(worth_loading(&from(0, 10), &[&peer], prefill(5_000.0)), 10);
        // 200 MiB wait: 2 s more, which 10 chunks of 51 ms each cannot win.
        peer.ordered(200 * MIB, Duration::from_secs(5));
        assert_eq!(worth_loading(&from(0, 10), &[&peer], prefill(5_000.0)), 0);
    }

    #[test]
    fn only_the_part_that_pays_is_loaded() {
        let (disk, peer) = (metered(2_000 * MIB), metered(20 * MIB));
        let pieces = [from(0, 20), from(1, 20)].concat();
        assert_eq!(worth_loading(&pieces, &[&disk, &peer], prefill(6_400.0)), 20);
        assert_eq!(worth_loading(&pieces, &[&disk, &peer], prefill(500.0)), 40);
    }

    #[test]
    fn what_is_in_place_costs_nothing_and_what_was_never_measured_is_tried() {
        let in_place = vec![ChunkSource { source: None, bytes: 4 * MIB }; 7];
        assert_eq!(worth_loading(&in_place, &[], prefill(1e9)), 7);
        assert_eq!(worth_loading(&from(0, 5), &[&Meter::default()], prefill(1e9)), 5);
        assert_eq!(worth_loading(&[], &[], prefill(1.0)), 0);
    }

    #[test]
    fn sources_that_load_at_the_same_time_do_not_add_up() {
        let (disk, peer) = (metered(100 * MIB), metered(100 * MIB));
        let pieces = [from(0, 10), from(1, 10)].concat();
        // 400 ms at once, against 20 chunks of 25 ms.
        assert_eq!(worth_loading(&pieces, &[&disk, &peer], prefill(10_240.0)), 20);
        assert_eq!(
            worth_loading(&from(0, 20), &[&disk], prefill(10_240.0)),
            0,
            "one after the other they do"
        );
    }
}

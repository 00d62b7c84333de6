//! Load or recompute: measures each source, and decides how much of a prefix is worth waiting for.
//!
//! Loading the first `k` chunks takes as long as the slowest source needs for its queue and for its share of these chunks. The
//! engine computes the other chunks afterwards, at its own speed. The `k` with the least total time is loaded. A source is
//! measured only while it has something to do. A source that was never measured is tried. A source that was not measured for a
//! while is tried with one chunk: otherwise a source that was slow once would stay unused.

use std::time::Duration;

/// The rate of a source, measured while the source has something to do.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Meter {
    /// Bytes that were delivered, and the seconds that they took. Older bytes and seconds weigh less.
    bytes: f64,
    seconds: f64,
    /// The time of the last sample.
    measured_at: Option<Duration>,
    /// Bytes that were ordered and not delivered.
    outstanding_bytes: u64,
    /// Bytes that were delivered since `since`, in a time too short to measure.
    unmeasured_bytes: u64,
    since: Duration,
}

/// One chunk of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSource {
    /// Position of the chunk's source among the meters; `None` if the chunk is in place.
    pub source: Option<usize>,
    /// The chunk's size.
    pub bytes: u64,
}

/// The engine's speed of computing chunks itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prefill {
    /// Tokens that the engine computes in a second.
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
        let is_first = self.measured_at.is_none() && self.outstanding_bytes == 0;
        if took < SHORTEST_SAMPLE && !is_first {
            return;
        }
        let seconds = took.max(SHORTEST_TIME).as_secs_f64();
        let kept = if self.is_old(now) { 0.0 } else { 1.0 - (seconds / MEMORY.as_secs_f64()).min(1.0) };
        self.bytes = self.bytes * kept + self.unmeasured_bytes as f64;
        self.seconds = self.seconds * kept + seconds;
        self.measured_at = Some(now);
        (self.since, self.unmeasured_bytes) = (now, 0);
    }

    /// Notes that ordered bytes will not come.
    pub fn gave_up(&mut self, bytes: u64) {
        self.outstanding_bytes = self.outstanding_bytes.saturating_sub(bytes);
    }

    /// The source's rate; `None` before its first delivery.
    pub fn bytes_per_second(&self) -> Option<f64> {
        self.measured_at.map(|_| self.bytes / self.seconds)
    }

    /// Whether the source has nothing to do, and its rate may have changed since it was measured.
    fn is_stale(&self, now: Duration) -> bool {
        self.measured_at.is_some() && self.is_old(now) && self.outstanding_bytes == 0
    }

    /// Whether the rate was measured too long ago. A shorter measurement is too old sooner.
    fn is_old(&self, now: Duration) -> bool {
        let counts = Duration::from_secs_f64((self.seconds * COUNTS_FOR).clamp(1.0, COUNTS_FOR));
        self.measured_at.is_none_or(|at| now.saturating_sub(at) >= counts)
    }

    /// Seconds until the source has delivered `bytes` more bytes. A source that was never measured counts as fast, so that it
    /// is tried and measured.
    pub fn seconds_for(&self, bytes: u64) -> f64 {
        let all = (self.outstanding_bytes + bytes) as f64;
        self.bytes_per_second().map_or(0.0, |rate| all / rate.max(1.0))
    }
}

/// The number of chunks that are worth loading: at least those in place at the front. One more chunk is loaded if its source was
/// not measured for a while.
pub fn worth_loading(pieces: &[ChunkSource], meters: &[&Meter], prefill: Prefill, now: Duration) -> usize {
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
    let next = pieces.get(best).and_then(|piece| piece.source);
    best + usize::from(next.is_some_and(|source| meters[source].is_stale(now)))
}

/// Deliveries within less than this are measured together.
const SHORTEST_SAMPLE: Duration = Duration::from_millis(1);

/// The shortest time of a delivery.
const SHORTEST_TIME: Duration = Duration::from_micros(1);

/// A sample of this length replaces all earlier samples.
const MEMORY: Duration = Duration::from_secs(1);

/// A measurement counts for this many times its own length, for a second at least, and for this many seconds at most.
const COUNTS_FOR: f64 = 20.0;

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A moment after the measurements of these tests.
    const SOON: Duration = Duration::from_secs(2);

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
        // A long idle time says nothing. Then the source is half as fast for a while.
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
    fn one_slow_moment_weighs_no_more_than_its_time() {
        let (mut meter, mut now) = (Meter::default(), Duration::from_millis(50));
        meter.ordered(MIB / 4, Duration::ZERO);
        meter.delivered(MIB / 4, now);
        assert_eq!(meter.bytes_per_second(), Some((5 * MIB) as f64), "a connection had to open");
        for _ in 0..20 {
            meter.ordered(MIB, now);
            now += Duration::from_millis(20);
            meter.delivered(MIB, now);
        }
        let rate = meter.bytes_per_second().unwrap() / MIB as f64;
        assert!((44.0..50.0).contains(&rate), "{rate}");
    }

    #[test]
    fn a_source_that_was_slow_once_is_tried_again_with_one_chunk_and_soon_used() {
        let slow = metered(MIB);
        let later = Duration::from_secs(21);
        assert_eq!(worth_loading(&from(0, 10), &[&slow], prefill(5_000.0), SOON), 0);
        assert_eq!(worth_loading(&from(0, 10), &[&slow], prefill(5_000.0), later), 1);
        let mut seldom = Meter::default();
        seldom.ordered(4 * MIB, Duration::ZERO);
        seldom.delivered(4 * MIB, Duration::from_millis(500));
        let after = |millis: u64| Duration::from_millis(500 + millis);
        assert_eq!(worth_loading(&from(0, 10), &[&seldom], prefill(5_000.0), after(9_900)), 0);
        assert_eq!(worth_loading(&from(0, 10), &[&seldom], prefill(5_000.0), after(10_000)), 1);
        let mut busy = slow;
        busy.ordered(4 * MIB, later);
        assert_eq!(worth_loading(&from(0, 10), &[&busy], prefill(5_000.0), later), 0, "it is being tried");
        let now = later + Duration::from_millis(40);
        busy.delivered(4 * MIB, now);
        assert_eq!(busy.bytes_per_second(), Some((100 * MIB) as f64), "the old rate says nothing");
        assert_eq!(worth_loading(&from(0, 10), &[&busy], prefill(5_000.0), now), 10);
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
        assert_eq!(worth_loading(&from(0, 10), &[&peer], prefill(6_300.0), SOON), 10);
        assert_eq!(worth_loading(&from(0, 10), &[&peer], prefill(6_500.0), SOON), 0);
    }

    #[test]
    fn what_waits_before_is_counted() {
        let mut peer = metered(100 * MIB);
        assert_eq!(worth_loading(&from(0, 10), &[&peer], prefill(5_000.0), SOON), 10);
        // 200 MiB wait, and take 2 s. Computing 10 chunks takes 51 ms each, so loading cannot win.
        peer.ordered(200 * MIB, Duration::from_secs(5));
        assert_eq!(worth_loading(&from(0, 10), &[&peer], prefill(5_000.0), SOON), 0);
    }

    #[test]
    fn only_the_part_that_pays_is_loaded() {
        let (disk, peer) = (metered(2_000 * MIB), metered(20 * MIB));
        let pieces = [from(0, 20), from(1, 20)].concat();
        assert_eq!(worth_loading(&pieces, &[&disk, &peer], prefill(6_400.0), SOON), 20);
        assert_eq!(worth_loading(&pieces, &[&disk, &peer], prefill(500.0), SOON), 40);
    }

    #[test]
    fn what_is_in_place_costs_nothing_and_what_was_never_measured_is_tried() {
        let in_place = vec![ChunkSource { source: None, bytes: 4 * MIB }; 7];
        assert_eq!(worth_loading(&in_place, &[], prefill(1e9), SOON), 7);
        assert_eq!(worth_loading(&from(0, 5), &[&Meter::default()], prefill(1e9), SOON), 5);
        assert_eq!(worth_loading(&[], &[], prefill(1.0), SOON), 0);
    }

    #[test]
    fn sources_that_load_at_the_same_time_do_not_add_up() {
        let (disk, peer) = (metered(100 * MIB), metered(100 * MIB));
        let pieces = [from(0, 10), from(1, 10)].concat();
        // Both sources load at once, in 400 ms. Computing takes 25 ms for each of 20 chunks.
        assert_eq!(worth_loading(&pieces, &[&disk, &peer], prefill(10_240.0), SOON), 20);
        assert_eq!(
            worth_loading(&from(0, 20), &[&disk], prefill(10_240.0), SOON),
            0,
            "one after the other they do"
        );
    }

    #[test]
    fn what_was_ordered_first_is_measured_from_its_order_on() {
        let mut meter = Meter::default();
        meter.ordered(MIB, Duration::ZERO);
        meter.ordered(MIB, Duration::from_millis(500));
        meter.delivered(2 * MIB, Duration::from_secs(1));
        assert_eq!(meter.bytes_per_second(), Some((2 * MIB) as f64));
    }
}

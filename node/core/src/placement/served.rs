//! How much a node serves: the bytes of blocks that it sent to other nodes lately.

/// A node's served bytes. The latest bytes count most.
#[derive(Debug, Clone, Copy, Default)]
pub struct Served {
    bytes: f64,
    at_ms: u64,
}

impl Served {
    /// Notes that blocks of so many bytes go to another node.
    pub fn sent(&mut self, bytes: u64, now_ms: u64) {
        self.bytes = self.left(now_ms) + bytes as f64;
        self.at_ms = self.at_ms.max(now_ms);
    }

    /// Bytes a second, over the last minutes.
    pub fn bytes_a_second(&self, now_ms: u64) -> u64 {
        (self.left(now_ms) / LASTS_SECONDS) as u64
    }

    fn left(&self, now_ms: u64) -> f64 {
        self.bytes * (-(now_ms.saturating_sub(self.at_ms) as f64) / (LASTS_SECONDS * 1e3)).exp()
    }
}

/// The mean age of the bytes that count. A request of an agent reads some GiB at once. Over a shorter time, the node that served
/// the last request would always serve more than its share, and its readers would keep chunks that nobody else asks for.
const LASTS_SECONDS: f64 = 300.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_even_stream_shows_its_rate_and_is_forgotten_within_the_hour() {
        let mut served = Served::default();
        assert_eq!(served.bytes_a_second(5), 0);
        (0..3_000).for_each(|second| served.sent(1_000, second * 1_000));
        let rate = served.bytes_a_second(2_999_500);
        assert!((950..=1_050).contains(&rate), "{rate}");
        assert!(served.bytes_a_second(6_000_000) < 1, "nothing was sent for fifty minutes");
    }

    #[test]
    fn a_clock_that_stands_still_or_goes_back_loses_nothing() {
        let mut served = Served::default();
        served.sent(30_000, 1_000);
        served.sent(30_000, 1_000);
        served.sent(30_000, 500);
        assert_eq!(served.bytes_a_second(1_000), 300);
    }
}

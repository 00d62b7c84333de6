//! The pace: how fast a node sends blocks, to all peers together.

use std::cell::Cell;
use std::num::NonZeroU64;
use std::time::Duration;

use crate::clock::Clock;

/// Lets so many bytes pass a second. Who sends asks for a piece at a time and goes in the order of asking, so that streams
/// share what there is.
pub(super) struct Pace {
    bytes_per_second: Option<NonZeroU64>,
    clock: Clock,
    /// When everything that was let pass so far is over.
    over: Cell<Duration>,
}

impl Pace {
    /// As fast as the network is where there is no number.
    pub(super) fn new(bytes_per_second: Option<NonZeroU64>, clock: Clock) -> Self {
        Self { bytes_per_second, clock, over: Cell::new(Duration::ZERO) }
    }

    /// Waits until a piece may go. Who gives up waiting has used its turn all the same.
    pub(super) async fn wait(&self, bytes: u64) {
        let Some(bytes_per_second) = self.bytes_per_second else { return };
        let now = self.clock.elapsed();
        let (turn, over) = turn(self.over.get(), now, bytes, bytes_per_second);
        self.over.set(over);
        if turn > now {
            tokio::time::sleep(turn - now).await;
        }
    }
}

/// When a piece may go, and when it is over. Of the time in which nothing went a little is made up for, since timers are late.
fn turn(over: Duration, now: Duration, bytes: u64, bytes_per_second: NonZeroU64) -> (Duration, Duration) {
    let turn = over.max(now.saturating_sub(MADE_UP));
    let takes = u128::from(bytes) * NANOSECONDS / u128::from(bytes_per_second.get());
    (turn, turn + Duration::from_nanos(u64::try_from(takes).unwrap_or(u64::MAX)))
}

/// Bytes of a piece: a few of them are under way in the least time that timers know.
pub(super) const PIECE_BYTES: usize = 256 << 10;

const MADE_UP: Duration = Duration::from_millis(5);

const NANOSECONDS: u128 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: NonZeroU64 = NonZeroU64::new(1_000_000).unwrap();

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn pieces_follow_each_other_at_the_rate() {
        assert_eq!(turn(ms(0), ms(0), 500_000, RATE), (ms(0), ms(500)));
        assert_eq!(turn(ms(500), ms(1), 250_000, RATE), (ms(500), ms(750)));
    }

    #[test]
    fn a_pause_is_made_up_for_by_a_few_milliseconds_alone() {
        assert_eq!(turn(ms(500), ms(502), 1_000, RATE), (ms(500), ms(501)), "a timer was late");
        assert_eq!(
            turn(ms(500), ms(60_000), 1_000, RATE),
            (ms(59_995), ms(59_996)),
            "nothing went for a minute"
        );
    }

    #[test]
    fn no_number_of_bytes_overflows() {
        let (turn, over) = turn(ms(1), ms(1), u64::MAX, NonZeroU64::MIN);
        assert!(over > turn);
    }

    proptest::proptest! {
        #[test]
        fn in_no_stretch_of_time_goes_more_than_the_rate_and_what_is_made_up(
            asks in proptest::collection::vec((0_u64..20_000, 1_u64..300_000), 1..200)
        ) {
            let (mut now, mut over) = (Duration::ZERO, Duration::ZERO);
            let mut went: Vec<(Duration, u64)> = Vec::new();
            for (pause_us, bytes) in asks {
                now += Duration::from_micros(pause_us);
                let at;
                (at, over) = turn(over, now, bytes, RATE);
                now = now.max(at);
                went.push((now, bytes));
            }
            for first in 0..went.len() {
                let mut bytes = 0;
                for &(at, piece) in &went[first..] {
                    // The last piece of a stretch goes at once, and takes its time after it.
                    let allowed = (at - went[first].0 + MADE_UP).as_micros() as u64 + 1;
                    proptest::prop_assert!(bytes <= allowed, "{bytes} bytes in {allowed} us");
                    bytes += piece;
                }
            }
        }
    }
}

//! The alarm that a shell sets for its core's next deadline: one at a time.

use std::time::Duration;

/// The time of the alarm that is set, if one is.
///
/// An earlier deadline takes the alarm's place. If the later alarm rang too, each alarm that rings would set another, and the
/// shell would have more and more of them.
#[derive(Debug, Default)]
pub struct AlarmClock {
    due: Option<Duration>,
}

impl AlarmClock {
    /// Takes the core's next deadline. Returns the time of an alarm that the shell has to set now, in place of the one before.
    #[must_use]
    pub fn set(&mut self, deadline: Option<Duration>) -> Option<Duration> {
        let due = deadline.filter(|due| self.due.is_none_or(|set| *due < set))?;
        self.due = Some(due);
        Some(due)
    }

    /// Notes that the alarm of this time rings. Returns false if another took its place: then nothing is to be done.
    #[must_use]
    pub fn rings(&mut self, at: Duration) -> bool {
        self.due.take_if(|due| *due == at).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_that_an_earlier_one_replaced_does_not_ring() {
        let (mut clock, far) = (AlarmClock::default(), Duration::from_secs(2));
        // Every alarm that was ever set is still there, as if the shell could not take one back.
        let mut timers = vec![clock.set(Some(far)).expect("none is set")];
        let mut rung = 0;
        for at in (1..=100).map(|change| Duration::from_millis(4 * change)) {
            timers.extend(clock.set(Some(at)));
            assert!(clock.set(Some(at)).is_none(), "it is set");
            for at in timers.extract_if(.., |due| *due <= at).collect::<Vec<_>>() {
                if clock.rings(at) {
                    rung += 1;
                    timers.extend(clock.set(Some(far)));
                }
            }
        }
        assert_eq!(rung, 100);
        let rings: Vec<_> = timers.into_iter().filter(|&at| clock.rings(at)).collect();
        assert_eq!(rings, [far], "one of all that were set for this time");
    }

    #[test]
    fn an_alarm_may_be_set_again_when_it_has_rung() {
        let (mut clock, at) = (AlarmClock::default(), Duration::from_millis(3));
        assert_eq!(clock.set(Some(at)), Some(at));
        assert!(clock.rings(at));
        assert_eq!(clock.set(None), None);
        assert_eq!(clock.set(Some(at)), Some(at));
    }
}

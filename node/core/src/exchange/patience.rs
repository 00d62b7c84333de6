//! How long the node waits for a peer that it does not know yet, or that stops.

use std::time::Duration;

use super::NoPeer;

/// Waits for the node of a writer. That node may have joined so lately that this node does not know it yet.
#[derive(Debug)]
pub struct Arriving {
    until: Duration,
}

/// Tells a connection that stands still from a slow connection.
#[derive(Debug)]
pub struct Stall {
    before: Frames,
}

/// The frames of a connection so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frames {
    /// Pieces of streams that were sent.
    pub sent: u64,
    /// Acknowledgments that came.
    pub acknowledged: u64,
}

impl Arriving {
    /// Begins to wait.
    pub fn new(now: Duration) -> Self {
        Self { until: now + MEMBER_DEADLINE }
    }

    /// The pause before the next look for a node that cannot be asked now; `None` if looking again is in vain.
    pub fn pause(&self, now: Duration, why: NoPeer) -> Option<Duration> {
        (why == NoPeer::NotAMember && now < self.until).then_some(MEMBER_PAUSE)
    }
}

impl Stall {
    /// Begins to watch.
    pub fn new(frames: Frames) -> Self {
        Self { before: frames }
    }

    /// Whether the connection stood still since the last look. A connection goes on if it sends pieces and gets acknowledgments.
    pub fn is_there(&mut self, frames: Frames) -> bool {
        let before = std::mem::replace(&mut self.before, frames);
        frames.sent == before.sent || frames.acknowledged == before.acknowledged
    }
}

/// How long this node waits until it knows another node.
const MEMBER_DEADLINE: Duration = Duration::from_secs(5);
const MEMBER_PAUSE: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_writer_that_just_joined_is_waited_for_and_a_silent_one_is_not() {
        let arriving = Arriving::new(SECOND);
        assert!(arriving.pause(SECOND, NoPeer::Silent).is_none());
        let (mut now, mut looks) = (SECOND, 0);
        while let Some(pause) = arriving.pause(now, NoPeer::NotAMember) {
            now += pause;
            looks += 1;
        }
        assert_eq!((now, looks), (6 * SECOND, 250));
    }

    #[test]
    fn a_connection_stalls_if_either_side_stops() {
        let frames = |sent, acknowledged| Frames { sent, acknowledged };
        let mut stall = Stall::new(frames(10, 5));
        assert!(!stall.is_there(frames(11, 6)), "it is slow");
        assert!(!stall.is_there(frames(12, 7)));
        assert!(stall.is_there(frames(13, 7)), "nothing is acknowledged");
        assert!(stall.is_there(frames(13, 8)), "nothing is sent");
    }
}

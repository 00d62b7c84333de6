//! The actors' answers during a drain. An actor may hang: the others move their chunks nevertheless.

use std::time::Duration;

use futures_util::future::{LocalBoxFuture, join_all};
use larder_core::DrainProgress;
use larder_protocol::drain::DrainCounts;
use tokio::time::timeout;

use crate::tell::HANGS_AFTER;

/// The progress of each actor, as far as the actor has told it. An actor has one question at a time, so the questions to an actor
/// that hangs do not pile up.
pub(super) struct Heard<'a>(Vec<HeardActor<'a>>);

#[derive(Default)]
struct HeardActor<'a> {
    progress: DrainProgress,
    /// The question that it has not answered.
    asked: Option<LocalBoxFuture<'a, DrainProgress>>,
    /// Whether it knows the present order, or will when it answers.
    is_told: bool,
    /// The time since which it has not answered.
    silent_since: Option<Duration>,
    /// Whether it has been silent for so long that the drain goes on without it.
    hangs: bool,
}

impl<'a> Heard<'a> {
    pub(super) fn new(actors: usize) -> Self {
        Self((0..actors).map(|_| HeardActor::default()).collect())
    }

    /// Notes that there is another order, which no actor knows.
    pub(super) fn order_changed(&mut self) {
        self.0.iter_mut().for_each(|actor| actor.is_told = false);
    }

    /// Asks all actors, and waits for a moment for their answers. `ask` asks an actor by its number; it tells the actor the order
    /// first if its second argument is true.
    pub(super) async fn hear(
        &mut self,
        now: Duration,
        ask: impl Fn(usize, bool) -> LocalBoxFuture<'a, DrainProgress>,
    ) {
        let answers = self.0.iter_mut().enumerate().map(|(device, actor)| {
            let ask_now = || {
                let must_tell = !std::mem::replace(&mut actor.is_told, true);
                ask(device, must_tell)
            };
            timeout(ANSWER_WITHIN, actor.asked.get_or_insert_with(ask_now))
        });
        let answers = join_all(answers).await;
        for (device, (actor, answer)) in self.0.iter_mut().zip(answers).enumerate() {
            if let Ok(progress) = answer {
                (actor.progress, actor.asked, actor.silent_since, actor.hangs) =
                    (progress, None, None, false);
                continue;
            }
            let hangs = now - *actor.silent_since.get_or_insert(now) >= HANGS_AFTER;
            if hangs && !actor.hangs {
                tracing::warn!(device, "an actor does not answer: the drain goes on without it");
            }
            actor.hangs = hangs;
        }
    }

    /// The counts of all actors.
    pub(super) fn chunks(&self) -> DrainCounts {
        self.0.iter().map(|actor| actor.progress.chunks).fold(DrainCounts::default(), DrainCounts::and)
    }

    /// Whether every actor that does not hang has nothing more to move.
    pub(super) fn is_over(&self) -> bool {
        self.0.iter().all(|actor| actor.hangs || (actor.progress.is_over && actor.is_told))
    }
}

/// How long one question waits for an actor's answer.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::FutureExt as _;
    use futures_util::future::{pending, ready};

    use super::*;

    fn over(moved: u64) -> DrainProgress {
        let chunks = DrainCounts { moved, ..DrainCounts::default() };
        DrainProgress { is_over: true, chunks }
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_goes_on_without_an_actor_that_hangs() {
        let told = Cell::new([0; 2]);
        let mut heard = Heard::new(2);
        let ask = |device: usize, must_tell| {
            let mut counts = told.get();
            counts[device] += u32::from(must_tell);
            told.set(counts);
            if device == 0 { pending().boxed_local() } else { ready(over(3)).boxed_local() }
        };
        for second in 0..5 {
            heard.hear(Duration::from_secs(second), ask).await;
            assert!(!heard.is_over(), "it may still answer");
        }
        heard.hear(HANGS_AFTER, ask).await;
        assert!(heard.is_over());
        assert_eq!((heard.chunks().moved, told.get()), (3, [1, 1]));
    }

    #[tokio::test(start_paused = true)]
    async fn an_actor_that_hung_hears_the_present_order_before_the_drain_is_over() {
        let answers = tokio::sync::Notify::new();
        let mut heard = Heard::new(1);
        let ask = |_, must_tell: bool| {
            let answers = &answers;
            async move {
                answers.notified().await;
                if must_tell { DrainProgress::default() } else { over(1) }
            }
            .boxed_local()
        };
        heard.hear(Duration::ZERO, ask).await;
        heard.order_changed();
        answers.notify_one();
        heard.hear(HANGS_AFTER, ask).await;
        assert!(!heard.is_over(), "it has answered, and does not know the order");
        answers.notify_one();
        heard.hear(HANGS_AFTER, ask).await;
        assert!(!heard.is_over(), "it was told, and has chunks to move");
        answers.notify_one();
        heard.hear(HANGS_AFTER, ask).await;
        assert!(heard.is_over());
    }
}

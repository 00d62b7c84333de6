//! News for the cores of actors.

use std::time::Duration;

use actix::prelude::*;
use futures_util::future::join_all;
use larder_core::Event;
use tokio::time::timeout;

/// Tells an actor's core an event. The reply comes when the core has decided.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Tell(pub Event);

/// Tells each of these actors its event, all at once. Returns the places of those that have not heard it: an actor that hangs is
/// waited for a moment only, and hears it later.
pub(crate) async fn tell_each<'a, A>(told: impl IntoIterator<Item = (&'a A, Event)>) -> Vec<usize>
where
    A: Clone + Into<Recipient<Tell>> + 'a,
{
    let told = told.into_iter().map(|(actor, event)| {
        // An actor passes over a message whose sender is gone, so the sender waits beside.
        let told = actor.clone().into().send(Tell(event));
        // An error: the actor is stopping.
        timeout(HANGS_AFTER, actix_rt::spawn(async { _ = told.await }))
    });
    let heard = join_all(told).await.into_iter().enumerate();
    let silent: Vec<usize> = heard.filter(|(_, heard)| heard.is_err()).map(|(place, _)| place).collect();
    if !silent.is_empty() {
        tracing::error!(?silent, "an actor does not answer: it hears of a change when it does");
    }
    silent
}

/// The silence after which an actor counts as hanging: others go on without it. No step of an actor takes that long.
pub(crate) const HANGS_AFTER: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands on what it hears, and hangs until the other end takes it.
    struct Hangs(std::sync::mpsc::SyncSender<Event>);

    impl Actor for Hangs {
        type Context = Context<Self>;
    }

    impl Handler<Tell> for Hangs {
        type Result = ();

        fn handle(&mut self, Tell(event): Tell, _: &mut Self::Context) {
            self.0.send(event).unwrap();
        }
    }

    #[actix::test]
    async fn an_actor_that_hangs_keeps_news_from_no_other_is_not_waited_for_and_hears_all_later() {
        let start = || {
            let (heard, hears) = std::sync::mpsc::sync_channel(0);
            let arbiter = Arbiter::new();
            (Hangs::start_in_arbiter(&arbiter.handle(), |_| Hangs(heard)), hears, arbiter)
        };
        let ((hangs, late, _first), (other, hears, _second)) = (start(), start());
        let heard = std::thread::spawn(move || hears.into_iter().take(2).count());
        tokio::time::pause();
        let events: [fn() -> Event; 2] = [|| Event::Tick, || Event::Alarm];
        for event in events {
            assert!(tell_each([(&hangs, event()), (&other, event())]).await.contains(&0));
        }
        tokio::time::resume();
        let late = std::thread::spawn(move || late.into_iter().take(2).collect::<Vec<_>>());
        while !late.is_finished() || !heard.is_finished() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(matches!(late.join().unwrap()[..], [Event::Tick, Event::Alarm]));
        assert_eq!(heard.join().unwrap(), 2);
    }
}

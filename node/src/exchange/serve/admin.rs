//! An admin's requests to a node: policies, drains, configurations, purges, pins. The audit log notes each.

use actix::Recipient;
use larder_core::{AdminPin, Event};
use larder_protocol::drain::DrainCommand;
use larder_protocol::identity::Identity;
use larder_protocol::peer::{PeerRequest, PeerResponse};
use larder_protocol::pin::{DevicePin, PinCommand, PinStart};
use larder_protocol::session::Pinned;

use super::{Server, busy};
use crate::exchange::PinForAdmin;
use crate::tell::{Tell, tell_each};

impl Server {
    /// Carries out an admin's request.
    pub(super) async fn answer_admin(&self, peer: &Identity, request: PeerRequest) -> PeerResponse {
        match request {
            PeerRequest::SetPolicy(name) => {
                let response = set_policy(&self.services.tell, &name).await;
                self.note(peer, "set_policy", &name, &response);
                response
            }
            PeerRequest::Drain(command) => {
                let response = match (self.services.drain)(&peer.name, command) {
                    Ok(report) => PeerResponse::Drains(Box::new(report)),
                    Err(refused) => PeerResponse::Refused(refused),
                };
                match command {
                    DrainCommand::Start(start) => {
                        let what = format!("within {} ms, then {:?}", start.within_ms, start.then);
                        self.note(peer, "drain", &what, &response);
                    }
                    DrainCommand::Cancel => self.note(peer, "cancel_drain", "", &response),
                    DrainCommand::Report => {}
                }
                response
            }
            PeerRequest::Reload => match (self.services.reload)(format!("admin {}", peer.name)).await {
                Ok(reloaded) => PeerResponse::Reloaded(Box::new(reloaded)),
                Err(refused) => PeerResponse::Refused(refused),
            },
            PeerRequest::Purge(command) => {
                match (self.services.purge)(&format!("admin {}", peer.name), *command) {
                    Ok(report) => PeerResponse::Purges(Box::new(report)),
                    Err(refused) => PeerResponse::Refused(refused),
                }
            }
            PeerRequest::Pin(command) => {
                let what = match &*command {
                    PinCommand::Start(PinStart { hashes, duration_ms, .. }) => {
                        format!("{} chunks for {duration_ms} ms", hashes.len())
                    }
                    PinCommand::End(device, pin) => format!("pin {pin} of device {device}"),
                };
                let action = if matches!(*command, PinCommand::Start(_)) { "pin" } else { "unpin" };
                let response = pin(&self.services.pin, *command).await;
                self.note(peer, action, &what, &response);
                response
            }
            _ => PeerResponse::Refused("an admin may not send this request".to_owned()),
        }
    }

    /// Notes in the audit log what an admin did.
    fn note(&self, admin: &Identity, action: &str, what: &str, response: &PeerResponse) {
        let outcome = match response {
            PeerResponse::Refused(refused) => Err(refused.as_str()),
            PeerResponse::Busy(_) => Err("busy"),
            _ => Ok(()),
        };
        self.services.audit.note(&format!("admin {}", admin.name), action, what, outcome);
    }
}

/// Tells every actor the policy, by device. One that hangs keeps it from no other.
async fn set_policy(actors: &[Recipient<Tell>], name: &str) -> PeerResponse {
    let Ok(policy) = name.parse() else {
        return PeerResponse::Refused(format!("there is no policy `{name}`"));
    };
    let silent = tell_each(actors.iter().map(|actor| (actor, Event::PolicyIs(policy)))).await;
    tracing::info!(%policy, ?silent, "an admin has set the eviction policy");
    if silent.is_empty() {
        return PeerResponse::Done;
    }
    PeerResponse::Refused(format!(
        "the actors of devices {silent:?} do not answer: they hear of it when they do"
    ))
}

/// Has the actors that have a prompt's first chunks keep them, or ends a pin. If one actor refuses, no actor keeps them.
async fn pin(actors: &[Recipient<PinForAdmin>], command: PinCommand) -> PeerResponse {
    match command {
        PinCommand::Start(start) => {
            let mut pins = Vec::new();
            for (device, actor) in (0..).zip(actors) {
                let failed = match actor.send(PinForAdmin(AdminPin::Start(start.clone()))).await {
                    // There is nothing to pin.
                    Ok(Ok(Pinned { pin: 0, .. })) => continue,
                    Ok(Ok(Pinned { pin, chunks, duration_ms })) => {
                        pins.push(DevicePin { device, pin, chunks, duration_ms });
                        continue;
                    }
                    Ok(Err(refused)) => PeerResponse::Refused(refused),
                    Err(_) => busy(),
                };
                for DevicePin { device, pin, .. } in pins {
                    // Errors: the pin is over, or ends by itself.
                    let _ = actors[usize::from(device)].send(PinForAdmin(AdminPin::End(pin))).await;
                }
                return failed;
            }
            PeerResponse::Pinned(pins)
        }
        PinCommand::End(device, pin) => {
            let Some(actor) = actors.get(usize::from(device)) else {
                return PeerResponse::Refused("there is no such device".to_owned());
            };
            match actor.send(PinForAdmin(AdminPin::End(pin))).await {
                Ok(Ok(_)) => PeerResponse::Done,
                Ok(Err(refused)) => PeerResponse::Refused(refused),
                Err(_) => busy(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use actix::{Actor, Context, Handler, ResponseFuture};
    use larder_core::store::policy::PolicyName;
    use larder_protocol::Fingerprint;
    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

    use super::*;

    /// Pins under its number, or refuses if the number is 0. Tells which pins ended.
    struct Pins(u64, UnboundedSender<u64>);

    impl Actor for Pins {
        type Context = Context<Self>;
    }

    impl Handler<PinForAdmin> for Pins {
        type Result = Result<Pinned, String>;

        fn handle(&mut self, PinForAdmin(ask): PinForAdmin, _: &mut Self::Context) -> Self::Result {
            match ask {
                AdminPin::Start(_) if self.0 == 0 => Err("too much is pinned".to_owned()),
                AdminPin::Start(_) => Ok(Pinned { pin: self.0, chunks: 1, duration_ms: 5 }),
                AdminPin::End(pin) => {
                    self.1.send(pin).unwrap();
                    Ok(Pinned { pin, chunks: 0, duration_ms: 0 })
                }
            }
        }
    }

    /// Hands on the policies that it hears, or hangs.
    struct Hears(Option<UnboundedSender<PolicyName>>);

    impl Actor for Hears {
        type Context = Context<Self>;
    }

    impl Handler<Tell> for Hears {
        type Result = ResponseFuture<()>;

        fn handle(&mut self, Tell(event): Tell, _: &mut Self::Context) -> Self::Result {
            match (&self.0, event) {
                (Some(hears), Event::PolicyIs(policy)) => hears.send(policy).unwrap(),
                _ => return Box::pin(std::future::pending()),
            }
            Box::pin(std::future::ready(()))
        }
    }

    #[test]
    fn an_actor_that_hangs_keeps_a_policy_from_no_other_and_the_admin_hears_of_it() {
        actix::System::new().block_on(async {
            tokio::time::pause();
            let (hears, mut heard) = unbounded_channel();
            let actors = [None, Some(hears.clone()), Some(hears)];
            let actors = actors.map(|actor| Hears(actor).start().recipient());
            let answer = set_policy(&actors, "sieve").await;
            assert!(matches!(answer, PeerResponse::Refused(why) if why.contains("devices [0]")));
            assert_eq!([heard.try_recv(), heard.try_recv()], [Ok(PolicyName::Sieve); 2]);
            assert_eq!(set_policy(&actors[1..], "sieve").await, PeerResponse::Done);
        });
    }

    #[test]
    fn where_one_actor_refuses_a_pin_none_keeps_it() {
        actix::System::new().block_on(async {
            let (ended, mut ends) = unbounded_channel();
            let actors = |numbers: &[u64]| -> Vec<_> {
                numbers.iter().map(|&number| Pins(number, ended.clone()).start().recipient()).collect()
            };
            let start = PinStart { fingerprint: Fingerprint([1; 32]), hashes: Vec::new(), duration_ms: 5 };
            let answer = pin(&actors(&[7, 8]), PinCommand::Start(start.clone())).await;
            assert!(matches!(answer, PeerResponse::Pinned(pins) if pins.len() == 2));
            let answer = pin(&actors(&[7, 0, 8]), PinCommand::Start(start)).await;
            assert!(matches!(answer, PeerResponse::Refused(_)));
            assert_eq!((ends.try_recv(), ends.try_recv().is_err()), (Ok(7), true));
        });
    }
}

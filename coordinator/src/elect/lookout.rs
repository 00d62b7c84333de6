//! Asks the leader again and again whether it leads, over one connection.

use std::time::Duration;

use larder_net::quic::{Connection, Endpoint, read_message, write_message};
use larder_protocol::identity::Role;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage};
use larder_protocol::version::Version;
use quinn::{RecvStream, SendStream};
use tokio::net::lookup_host;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use crate::election::Candidate;

/// The questions and answers of an election. Questions to a leader that is being asked are merged; a question to another leader
/// ends the one before.
pub(crate) struct Lookout {
    questions: watch::Sender<Option<Candidate>>,
    answers: mpsc::Receiver<u64>,
}

impl Lookout {
    /// Asks this leader.
    pub(crate) fn ask(&self, leader: Candidate) {
        self.questions.send_replace(Some(leader));
    }

    /// The next life that says that it leads.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn answer(&mut self) -> u64 {
        match self.answers.recv().await {
            Some(life) => life,
            None => std::future::pending().await,
        }
    }
}

/// The questions of an election, and the task that asks them. `deadline` is the time for an answer.
pub(crate) fn look_out(endpoint: Endpoint, deadline: Duration) -> (Lookout, impl Future<Output = ()>) {
    let (questions, mut asked) = watch::channel(None::<Candidate>);
    let (answer, answers) = mpsc::channel(1);
    let task = async move {
        let mut line: Option<Line> = None;
        while asked.changed().await.is_ok() {
            let Some(leader) = asked.borrow_and_update().clone() else { continue };
            let mut later = asked.clone();
            let another = later.wait_for(|later| later.as_ref() != Some(&leader));
            let kept = line.take().filter(|line| line.leader == leader);
            let ask = async {
                let mut line = match kept {
                    Some(line) => line,
                    None => Line::open(&endpoint, leader.clone()).await?,
                };
                let life = line.ask().await?;
                Some((line, life))
            };
            let answered = tokio::select! {
                answered = timeout(deadline, ask) => answered.ok().flatten(),
                _ = another => None,
            };
            let Some((kept, life)) = answered else { continue };
            line = Some(kept);
            if let Some(life) = life
                && answer.send(life).await.is_err()
            {
                return;
            }
        }
    };
    (Lookout { questions, answers }, task)
}

/// A stream to a leader.
struct Line {
    leader: Candidate,
    send: SendStream,
    receive: RecvStream,
    /// The stream ends with it.
    _connection: Connection,
}

impl Line {
    async fn open(endpoint: &Endpoint, leader: Candidate) -> Option<Self> {
        let addresses: Vec<_> = lookup_host(&leader.peer).await.ok()?.collect();
        for address in addresses {
            let Ok(connection) = endpoint.connect(address, Role::Coordinator, None).await else { continue };
            if connection.version() < Version::SECOND {
                return None;
            }
            let (send, receive) = connection.quic().open_bi().await.ok()?;
            return Some(Self { leader, send, receive, _connection: connection });
        }
        None
    }

    /// The life of the coordinator, if it leads; `None` outside if the line is of no use any more.
    async fn ask(&mut self) -> Option<Option<u64>> {
        write_message(&mut self.send, &FollowerMessage::Who(None)).await.ok()?;
        match read_message(&mut self.receive).await {
            Ok(Some(CoordinatorMessage::Standing(standing))) => Some(standing.leads.then_some(standing.life)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use larder_net::quic::ca::{Authority, Validity};
    use larder_net::quic::{Credentials, TransportSettings};
    use larder_protocol::identity::Identity;
    use larder_protocol::membership::Standing;

    use super::*;

    fn endpoint(authority: &Authority) -> Endpoint {
        let issued = authority.issue(&Identity::new(Role::Coordinator, "c"), Validity::days(1)).unwrap();
        let (certificate, key) = (issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes());
        let ca = authority.certificate_pem().as_bytes();
        let credentials = Credentials::from_pem(ca, certificate, key).unwrap();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        Endpoint::bind(any, &credentials, &TransportSettings::default()).unwrap()
    }

    fn at(endpoint: &Endpoint, life: u64) -> Candidate {
        Candidate { life, peer: endpoint.local_address().to_string(), ..Candidate::default() }
    }

    /// Answers the questions on one connection.
    async fn serve_one(endpoint: Endpoint, life: u64) {
        let connection = endpoint.accept().await.unwrap().accept().await.unwrap();
        let (mut send, mut receive) = connection.quic().accept_bi().await.unwrap();
        while let Ok(Some(FollowerMessage::Who(None))) = read_message(&mut receive).await {
            let standing = Standing { life, leads: true, ..Standing::default() };
            write_message(&mut send, &CoordinatorMessage::Standing(standing)).await.unwrap();
        }
    }

    #[test]
    fn a_leader_that_answers_no_more_does_not_keep_its_successor_from_being_asked() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let (authority, _) = Authority::create(Validity::days(1)).unwrap();
            let [own, dead, alive] = [(); 3].map(|()| endpoint(&authority));
            let (dead, next) = (at(&dead, 1), (at(&alive, 2), alive));
            // Far longer than the test lasts.
            let (mut lookout, task) = look_out(own, Duration::from_secs(600));
            tokio::task::spawn_local(task);
            tokio::task::spawn_local(serve_one(next.1, 2));
            lookout.ask(dead);
            tokio::task::yield_now().await;
            for _ in 0..3 {
                lookout.ask(next.0.clone());
                let life = timeout(Duration::from_secs(30), lookout.answer()).await;
                assert_eq!(life, Ok(2), "each time on the same stream");
            }
        });
    }
}

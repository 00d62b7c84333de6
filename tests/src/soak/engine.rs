//! An engine of one tenant at one node: it plays requests, and connects again when the node is back.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use larder_client::{Namespace, Session, SessionError, SessionOptions};
use tokio::sync::Mutex;
use tokio::time::sleep;

use super::nodes::Node;
use super::request::{Asked, PART_BYTES, Request};
use super::space::Space;
use super::tally::Tally;
use crate::wait::now;

/// One engine. Its requests share a session.
pub(super) struct Engine {
    pub(super) node: Arc<Node>,
    pub(super) tenant: usize,
    pub(super) spaces: Rc<Vec<Space>>,
    pub(super) tally: Arc<Tally>,
    pub(super) open: Mutex<Option<Rc<Open>>>,
}

/// A session that knows all namespaces.
pub(super) struct Open {
    session: Session,
    namespaces: Vec<Namespace>,
}

impl Engine {
    /// Plays requests one after the other, without end.
    pub(super) async fn work(&self, mut rng: fastrand::Rng) {
        loop {
            let request = Request::draw(&self.spaces, &mut rng);
            self.serve(&request).await;
            self.tally.count(|counts| counts.requests += 1);
        }
    }

    /// Plays a request; plays it again if the node was killed or stopped meanwhile.
    async fn serve(&self, request: &Request) {
        let start = now();
        loop {
            let began = now();
            let Err(error) = self.attempt(request).await else { return };
            let is_excused = self.node.was_disturbed_since(began);
            if !is_excused || start.elapsed() > PATIENCE {
                let node = &self.node.name;
                let (took, words) = (began.elapsed(), with_causes(&error));
                let at = self.tally.elapsed().as_secs_f64();
                eprintln!("after {at:.1} s a request failed; the threads at {}", self.node.threads());
                self.tally.failed(1, || format!("{node}, in {took:.1?}: {words}: {request}"));
                sleep(PAUSE).await;
                return;
            }
            self.tally.count(|counts| counts.asked_again += 1);
            sleep(PAUSE).await;
        }
    }

    async fn attempt(&self, request: &Request) -> Result<(), SessionError> {
        let open = self.open().await?;
        let asked = Asked {
            session: &open.session,
            namespace: &open.namespaces[request.space],
            space: &self.spaces[request.space],
            tenant: self.tenant,
            tally: &self.tally,
        };
        let played = request.play(&asked).await;
        if played.as_ref().is_err_and(ends_session) {
            self.forget(&open).await;
        }
        played
    }

    /// The session. The first request that needs a session opens it.
    async fn open(&self) -> Result<Rc<Open>, SessionError> {
        let mut current = self.open.lock().await;
        if let Some(open) = &*current {
            return Ok(Rc::clone(open));
        }
        let largest = self.spaces.iter().map(Space::chunk_bytes).max().unwrap_or(0);
        let options = SessionOptions {
            client: "soak".into(),
            // Twice what the requests stage at a time: none waits because the free room is in pieces.
            window_bytes: 2 * IN_FLIGHT as u64 * (PART_BYTES + largest).next_multiple_of(4_096),
            timeout: DEADLINE,
            ..SessionOptions::default()
        };
        let session = Session::connect(&self.node.sockets[self.tenant], options).await?;
        let mut namespaces = Vec::new();
        for space in &*self.spaces {
            namespaces.push(session.register(&space.spec, &space.slices, &space.block_bytes).await?);
        }
        let open = Rc::new(Open { session, namespaces });
        *current = Some(Rc::clone(&open));
        Ok(open)
    }

    async fn forget(&self, open: &Rc<Open>) {
        let mut current = self.open.lock().await;
        if current.as_ref().is_some_and(|current| Rc::ptr_eq(current, open)) {
            *current = None;
        }
    }
}

/// Whether a new session may succeed after this error.
fn ends_session(error: &SessionError) -> bool {
    !matches!(error, SessionError::Refused(_) | SessionError::Busy { .. } | SessionError::Chain(_))
}

pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Requests of one engine at a time.
pub(super) const IN_FLIGHT: usize = 3;

/// How long a node may take to answer.
const DEADLINE: Duration = Duration::from_secs(10);

/// How long a request may be repeated.
const PATIENCE: Duration = Duration::from_secs(60);

/// Pause before a request is repeated.
const PAUSE: Duration = Duration::from_millis(100);

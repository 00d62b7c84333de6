//! Request bodies: bounds the bytes in memory, and parses on threads of their own.
//!
//! Small bodies have memory and a thread of their own, so large bodies do not keep them waiting. One host has half of the memory
//! of small bodies at most. A body that gets no thread soon is refused: its asker learns that it should ask later.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use actix_web::error::InternalError;
use actix_web::http::header::{CONTENT_LENGTH, RETRY_AFTER};
use actix_web::web::{Bytes, BytesMut, Payload};
use actix_web::{Error, HttpRequest, HttpResponse, error};
use futures_util::StreamExt as _;
use larder_net::blocking::try_blocking;
use larder_net::http::body_in_time;
use larder_net::quic::host_of;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// The bodies that are being read and understood. Cloning shares.
#[derive(Clone)]
pub(crate) struct Bodies {
    small: Share,
    large: Share,
}

/// The share of bodies of one size.
#[derive(Clone)]
struct Share {
    /// Room for bytes in memory, in units of [`UNIT_BYTES`].
    room: Arc<Semaphore>,
    /// The units that one host may have.
    most_of_a_source: usize,
    /// The units that each host may still take. A host without bodies has no entry, or a dead one.
    sources: Arc<Mutex<HashMap<IpAddr, Weak<Semaphore>>>>,
    /// Places on the threads that parse bodies.
    threads: Arc<Semaphore>,
}

/// A body in memory.
pub(super) struct Body {
    bytes: BytesMut,
    held: Held,
    threads: Arc<Semaphore>,
}

/// The units that a body has, of all and of its host.
struct Held {
    room: OwnedSemaphorePermit,
    of_source: OwnedSemaphorePermit,
}

impl Bodies {
    pub(crate) fn new() -> Self {
        let share = |bytes: usize, of_a_source: usize, threads| Share {
            room: Arc::new(Semaphore::new(bytes / UNIT_BYTES)),
            most_of_a_source: of_a_source / UNIT_BYTES,
            sources: Arc::default(),
            threads: Arc::new(Semaphore::new(threads)),
        };
        Self {
            small: share(MAX_SMALL_BYTES_HERE, MAX_SMALL_BYTES_HERE / 2, SMALL_THREADS),
            large: share(MAX_BYTES_HERE, MAX_BYTES_HERE, THREADS),
        }
    }

    /// Reads a request's body. Bytes count as they arrive, not as announced.
    pub(super) async fn read(&self, head: &HttpRequest, payload: Payload) -> Result<Body, Error> {
        let announced =
            head.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        if announced.is_some_and(|bytes: u64| bytes > MAX_BODY_BYTES as u64) {
            return Err(too_long());
        }
        let source = head.peer_addr().map_or(Ipv4Addr::UNSPECIFIED.into(), |from| host_of(from.ip()));
        body_in_time(head, self.read_all(source, payload)).await
    }

    async fn read_all(&self, source: IpAddr, mut payload: Payload) -> Result<Body, Error> {
        let mut body = self.small.body(source)?;
        while let Some(piece) = payload.next().await {
            let piece: Bytes = piece?;
            let bytes = body.bytes.len() + piece.len();
            if bytes > MAX_BODY_BYTES {
                return Err(too_long());
            }
            let is_large = bytes > MAX_SMALL_BODY_BYTES;
            if is_large && body.bytes.len() <= MAX_SMALL_BODY_BYTES {
                body = Body { bytes: body.bytes, ..self.large.body(source)? };
            }
            let share = if is_large { &self.large } else { &self.small };
            share.take(source, bytes.div_ceil(UNIT_BYTES), &mut body.held)?;
            body.bytes.extend_from_slice(&piece);
        }
        Ok(body)
    }
}

impl Share {
    /// A body without bytes, which holds no units.
    fn body(&self, source: IpAddr) -> Result<Body, Error> {
        let none = |of: Arc<Semaphore>| of.try_acquire_many_owned(0).map_err(|_| busy());
        let held = Held { room: none(Arc::clone(&self.room))?, of_source: none(self.units_of(source))? };
        Ok(Body { bytes: BytesMut::new(), held, threads: Arc::clone(&self.threads) })
    }

    /// Takes the units that a body of this host lacks to have this many.
    fn take(&self, source: IpAddr, units: usize, held: &mut Held) -> Result<(), Error> {
        let missing = units.saturating_sub(held.room.num_permits()) as u32;
        let take = |of: Arc<Semaphore>| of.try_acquire_many_owned(missing).map_err(|_| busy());
        // Both or none: an error drops the first.
        let (of_source, room) = (take(self.units_of(source))?, take(Arc::clone(&self.room))?);
        held.of_source.merge(of_source);
        held.room.merge(room);
        Ok(())
    }

    /// The units that a host may still take; they live as long as a body of the host.
    fn units_of(&self, source: IpAddr) -> Arc<Semaphore> {
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(units) = sources.get(&source).and_then(Weak::upgrade) {
            return units;
        }
        sources.retain(|_, units| units.strong_count() > 0);
        let units = Arc::new(Semaphore::new(self.most_of_a_source));
        sources.insert(source, Arc::downgrade(&units));
        units
    }
}

impl Body {
    /// Parses the body with `read`, on a thread that may take its time. An error is the asker's fault, except for 503: then no
    /// thread was free for [`PATIENCE`].
    pub(super) async fn understand<T: Send + 'static>(
        self,
        read: impl FnOnce(BytesMut) -> Result<T, String> + Send + 'static,
    ) -> Result<T, Error> {
        let Self { bytes, held, threads } = self;
        let place = timeout(PATIENCE, threads.acquire_owned()).await.map_err(|_| busy())?;
        // This never fails, since nobody closes the semaphore.
        let place = place.map_err(error::ErrorInternalServerError)?;
        let understood = try_blocking(move || {
            let _until_done = (held, place);
            read(bytes)
        });
        understood.await.map_err(error::ErrorInternalServerError)?.map_err(error::ErrorBadRequest)
    }
}

/// The answer to a request for which there is no room.
pub(super) fn busy() -> Error {
    let text = "the coordinator has too many requests at a time: ask again in a moment\n";
    let response = HttpResponse::ServiceUnavailable().insert_header((RETRY_AFTER, "1")).body(text);
    InternalError::from_response(text, response).into()
}

fn too_long() -> Error {
    error::ErrorPayloadTooLarge(format!("a body has at most {MAX_BODY_BYTES} bytes\n"))
}

/// A prompt of two million tokens, as numbers of seven digits.
const MAX_BODY_BYTES: usize = 16 << 20;

/// The longest small body: a prompt of some 10,000 tokens.
const MAX_SMALL_BODY_BYTES: usize = 64 << 10;

/// Bytes of all large bodies in memory: four of the largest.
const MAX_BYTES_HERE: usize = 4 * MAX_BODY_BYTES;

/// Bytes of all small bodies in memory. More units than connections to the HTTP endpoint.
const MAX_SMALL_BYTES_HERE: usize = 128 * MAX_SMALL_BODY_BYTES;

/// The unit of the count of bytes.
const UNIT_BYTES: usize = 4 << 10;

/// Large bodies that are parsed at a time: the coordinator's other threads need CPUs too.
const THREADS: usize = 2;

/// Small bodies that are parsed at a time: each takes some milliseconds at most.
const SMALL_THREADS: usize = 1;

/// How long a body waits for a thread.
const PATIENCE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use actix_web::FromRequest as _;
    use actix_web::error::PayloadError;
    use actix_web::http::StatusCode;
    use actix_web::rt::task::JoinHandle;
    use actix_web::test::TestRequest;
    use futures_util::stream;

    use super::*;

    async fn read(bodies: &Bodies, bytes: usize) -> Result<Body, Error> {
        let (head, mut payload) = TestRequest::post().set_payload(vec![b' '; bytes]).to_http_parts();
        let payload = Payload::from_request(&head, &mut payload).await?;
        bodies.read(&head, payload).await
    }

    #[actix_web::test]
    async fn large_bodies_that_take_long_are_refused_and_small_ones_are_understood_meanwhile() {
        let bodies = Bodies::new();
        let (go, waits) = mpsc::channel::<()>();
        let waits = Arc::new(Mutex::new(waits));
        let mut slow = Vec::new();
        for _ in 0..THREADS {
            let (body, waits) = (read(&bodies, 1 << 20).await.unwrap(), Arc::clone(&waits));
            let understood = body.understand(move |_| {
                _ = waits.lock().unwrap().recv();
                Ok(())
            });
            slow.push(actix_web::rt::spawn(understood));
        }
        while bodies.large.threads.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let refused = read(&bodies, 1 << 20).await.unwrap().understand(|_| Ok(())).await.unwrap_err();
        let response = refused.error_response();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers().get(RETRY_AFTER).unwrap(), "1");
        let small = read(&bodies, MAX_SMALL_BODY_BYTES).await.unwrap();
        assert_eq!(small.understand(|bytes| Ok(bytes.len())).await.unwrap(), MAX_SMALL_BODY_BYTES);
        drop(go);
        for understood in slow {
            understood.await.unwrap().unwrap();
        }
        read(&bodies, 1 << 20).await.unwrap().understand(|_| Ok(())).await.unwrap();
    }

    /// Reads a body from this address, of which only the first `bytes` come.
    async fn begin(bodies: Bodies, from: IpAddr, bytes: usize) -> Result<Body, Error> {
        let first = (bytes > 0).then(|| Ok::<_, PayloadError>(Bytes::from(vec![b' '; bytes])));
        let body = stream::iter(first).chain(stream::pending()).boxed_local();
        let (head, _) = TestRequest::post().peer_addr((from, 1).into()).to_http_parts();
        let payload = Payload::from_request(&head, &mut body.into()).await?;
        bodies.read(&head, payload).await
    }

    #[actix_web::test]
    async fn one_host_leaves_memory_for_others_however_little_it_sends_on_each_connection() {
        let one = |_| IpAddr::from([10, 0, 0, 1]);
        // All of its IPv6 network of 64 bits.
        let many = |last| IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, last]);
        for (bytes, address) in [0, 1, UNIT_BYTES, MAX_SMALL_BODY_BYTES]
            .into_iter()
            .flat_map(|bytes| [(bytes, one as fn(u16) -> IpAddr), (bytes, many)])
        {
            let bodies = Bodies::new();
            let mut held = Vec::new();
            for last in 0..512 {
                held.push(actix_web::rt::spawn(begin(bodies.clone(), address(last), bytes)));
                tokio::task::yield_now().await;
            }
            assert!(read(&bodies, MAX_SMALL_BODY_BYTES).await.is_ok(), "{bytes}");
            held.iter().for_each(JoinHandle::abort);
        }
    }

    #[actix_web::test]
    async fn large_bodies_leave_memory_for_small_ones() {
        let bodies = Bodies::new();
        let mut held = Vec::new();
        let refused = loop {
            match read(&bodies, MAX_BODY_BYTES).await {
                Ok(body) => held.push(body),
                Err(refused) => break refused.error_response(),
            }
        };
        assert_eq!((held.len(), refused.status()), (4, StatusCode::SERVICE_UNAVAILABLE));
        assert!(read(&bodies, MAX_SMALL_BODY_BYTES).await.is_ok());
        held.pop();
        assert!(read(&bodies, MAX_BODY_BYTES).await.is_ok(), "its bytes are free again");
    }
}

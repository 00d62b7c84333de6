//! Request bodies: bounds the bytes in memory, and parses on threads of their own.

use std::sync::Arc;

use actix_web::http::header::CONTENT_LENGTH;
use actix_web::web::{Bytes, BytesMut, Payload};
use actix_web::{Error, HttpRequest, error};
use futures_util::StreamExt as _;
use larder_net::http::body_in_time;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The bodies that are being read and understood. Cloning shares.
#[derive(Clone)]
pub(crate) struct Bodies {
    /// Room for bytes in memory, in units of [`UNIT_BYTES`].
    room: Arc<Semaphore>,
    /// Places on the threads that parse bodies.
    threads: Arc<Semaphore>,
}

/// A body in memory.
pub(super) struct Body {
    bytes: BytesMut,
    held: OwnedSemaphorePermit,
    threads: Arc<Semaphore>,
}

impl Bodies {
    pub(crate) fn new() -> Self {
        let room = Arc::new(Semaphore::new(MAX_BYTES_HERE.div_ceil(UNIT_BYTES)));
        Self { room, threads: Arc::new(Semaphore::new(THREADS)) }
    }

    /// Reads a request's body. Bytes count as they arrive, not as announced.
    pub(super) async fn read(&self, head: &HttpRequest, payload: Payload) -> Result<Body, Error> {
        let announced =
            head.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        if announced.is_some_and(|bytes: u64| bytes > MAX_BODY_BYTES as u64) {
            return Err(too_long());
        }
        body_in_time(self.read_all(payload)).await
    }

    async fn read_all(&self, mut payload: Payload) -> Result<Body, Error> {
        let mut body =
            Body { bytes: BytesMut::new(), held: self.take(1)?, threads: Arc::clone(&self.threads) };
        while let Some(piece) = payload.next().await {
            let piece: Bytes = piece?;
            let bytes = body.bytes.len() + piece.len();
            if bytes > MAX_BODY_BYTES {
                return Err(too_long());
            }
            let missing = bytes.div_ceil(UNIT_BYTES).saturating_sub(body.held.num_permits());
            body.held.merge(self.take(missing)?);
            body.bytes.extend_from_slice(&piece);
        }
        Ok(body)
    }

    fn take(&self, units: usize) -> Result<OwnedSemaphorePermit, Error> {
        let taken = Arc::clone(&self.room).try_acquire_many_owned(units as u32);
        taken.map_err(|_| {
            error::ErrorServiceUnavailable(
                "the coordinator has too many requests at a time: ask again in a moment\n",
            )
        })
    }
}

impl Body {
    /// Parses the body with `read`, on a thread that may take its time. An error is the asker's fault.
    pub(super) async fn understand<T: Send + 'static>(
        self,
        read: impl FnOnce(BytesMut) -> Result<T, String> + Send + 'static,
    ) -> Result<T, Error> {
        let Self { bytes, held, threads } = self;
        // This never fails, since nobody closes the semaphore.
        let place = threads.acquire_owned().await.map_err(error::ErrorInternalServerError)?;
        let understood = tokio::task::spawn_blocking(move || {
            let _until_done = (held, place);
            read(bytes)
        });
        understood.await.map_err(error::ErrorInternalServerError)?.map_err(error::ErrorBadRequest)
    }
}

fn too_long() -> Error {
    error::ErrorPayloadTooLarge(format!("a body has at most {MAX_BODY_BYTES} bytes\n"))
}

/// A prompt of two million tokens, as numbers of seven digits.
const MAX_BODY_BYTES: usize = 16 << 20;

/// Bytes of all bodies in memory: four of the largest.
const MAX_BYTES_HERE: usize = 4 * MAX_BODY_BYTES;

/// The unit of the count of bytes.
const UNIT_BYTES: usize = 16 << 10;

/// Bodies that are parsed at a time: the coordinator's other threads need CPUs too.
const THREADS: usize = 2;

//! Sends spans: one blocking request after the other, on the exporter's own thread.

use std::time::Duration;

use futures_util::future::BoxFuture;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};

/// A client without a runtime. Its futures are ready at once.
#[derive(Debug)]
pub(super) struct BlockingClient(ureq::Agent);

impl BlockingClient {
    pub(super) fn new() -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            // A refusal is an answer too: the exporter reads its status.
            .http_status_as_error(false);
        Self(config.build().into())
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let mut answer = self.0.run(Request::from_parts(head, body.to_vec()))?;
        let body = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec()?;
        Ok(answer.map(|_| Bytes::from(body)))
    }
}

impl HttpClient for BlockingClient {
    fn send_bytes<'client, 'future>(
        &'client self,
        request: Request<Bytes>,
    ) -> BoxFuture<'future, Result<Response<Bytes>, HttpError>>
    where
        'client: 'future,
        Self: 'future,
    {
        Box::pin(std::future::ready(self.send(request)))
    }
}

/// How long a collector may take for a batch.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Collectors answer a few bytes.
const MAX_ANSWER_BYTES: u64 = 64 << 10;

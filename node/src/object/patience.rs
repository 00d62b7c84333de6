//! Hears for how long an overloaded store wants to be left alone: `Retry-After` of its answers 429 and 503.
//!
//! The `object_store` crate does not tell this header, so the connector reads it beside the crate.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, Result};
use tokio::time::Instant;

/// The time until which the store wants no requests. Cloning shares.
#[derive(Debug, Clone, Default)]
pub(super) struct AskedPause(Arc<Mutex<Option<Instant>>>);

impl AskedPause {
    /// The time, unless it is over.
    pub(super) fn until(&self) -> Option<Instant> {
        self.lock().filter(|&until| until > Instant::now())
    }

    fn hear(&self, answer: &HttpResponse) {
        if !matches!(answer.status().as_u16(), 429 | 503) {
            return;
        }
        // A date instead of seconds counts as no header: stores send seconds.
        let header = answer.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        header.map(Duration::from_secs).into_iter().for_each(|pause| self.ask(pause));
    }

    /// Notes that the store wants to be left alone for this time. A longer pause that it asked for before stays.
    pub(super) fn ask(&self, pause: Duration) {
        let (mut until, asked) = (self.lock(), Instant::now() + pause.min(LONGEST));
        *until = until.max(Some(asked));
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        larder_net::lock(&self.0)
    }
}

impl HttpConnector for AskedPause {
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Hearing { client, pause: self.clone() }))
    }
}

/// A client whose answers are heard.
#[derive(Debug)]
struct Hearing {
    client: HttpClient,
    pause: AskedPause,
}

#[async_trait]
impl HttpService for Hearing {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let answer = self.client.execute(request).await?;
        self.pause.hear(&answer);
        Ok(answer)
    }
}

/// A store that asks for more is tried after this time all the same.
const LONGEST: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_shorter_pause_does_not_shorten_a_longer_one() {
        let (pause, long) = (AskedPause::default(), Duration::from_secs(120));
        pause.ask(long);
        pause.ask(Duration::from_secs(1));
        assert_eq!(pause.until(), Some(Instant::now() + long));
        pause.ask(2 * long);
        assert_eq!(pause.until(), Some(Instant::now() + 2 * long));
    }
}

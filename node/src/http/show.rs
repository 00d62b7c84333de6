//! The JSON answers, over HTTP, or over QUIC for a coordinator or an admin that cannot reach the HTTP server.

use std::collections::HashMap;
use std::sync::Arc;

use actix_web::error::ErrorPayloadTooLarge;
use actix_web::http::StatusCode;
use actix_web::web::{Bytes, Data, Payload};
use actix_web::{Error, HttpRequest, HttpResponse};
use larder_net::http::{arguments, body_in_time, in_pieces};
use larder_protocol::limits::MAX_PEER_MESSAGE_BYTES;
use serde::Serialize;

use super::{HttpState, counters, doctor, lists, past, prefixes, status, what_if, why};

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    /// There is no such path.
    #[error("there is no such page")]
    NoPath,
    /// The question cannot be understood or answered; the text says why.
    #[error("{0}")]
    Question(String),
    /// The answer cannot be written.
    #[error("cannot write the answer: {0}")]
    Answer(#[from] serde_json::Error),
}

/// The arguments of a path, by name.
pub(super) type Arguments = HashMap<String, String>;

/// Answers over HTTP.
pub(super) async fn answer(
    state: Data<Arc<HttpState>>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, Error> {
    let body = read(&request, body).await?;
    let response = match state.show(request.path(), request.query_string(), &body).await {
        Ok(json) => in_pieces("application/json", json),
        Err(refused) => {
            let status = match refused {
                Refused::NoPath => StatusCode::NOT_FOUND,
                Refused::Question(_) => StatusCode::BAD_REQUEST,
                Refused::Answer(_) => StatusCode::INTERNAL_SERVER_ERROR,
            };
            HttpResponse::build(status).body(format!("{refused}\n"))
        }
    };
    Ok(response)
}

/// Reads the body of a question.
async fn read(request: &HttpRequest, body: Payload) -> Result<Bytes, Error> {
    let too_long = |_| ErrorPayloadTooLarge(format!("a body has at most {MAX_BODY_BYTES} bytes\n"));
    body_in_time(request, async { body.to_bytes_limited(MAX_BODY_BYTES).await.map_err(too_long)? }).await
}

impl HttpState {
    /// Answers over QUIC; the error is for people.
    pub(crate) async fn show_peer(&self, path: &str, body: &[u8]) -> Result<Vec<u8>, String> {
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let shown = self.show(path, query, body).await.map_err(|refused| refused.to_string())?;
        if shown.len() > MOST_SHOWN_BYTES {
            return Err(format!("the answer has {} bytes: ask for less", shown.len()));
        }
        Ok(shown)
    }

    async fn show(&self, path: &str, query: &str, body: &[u8]) -> Result<Vec<u8>, Refused> {
        let known: &[&str] = match path {
            "/lookups" => &why::LOOKUPS_ARGUMENTS,
            "/past" => &[past::MOST_CHUNKS],
            _ => &[],
        };
        let arguments = arguments(path, query, known).map_err(Refused::Question)?;
        match path {
            "/status" => json(&status(self).await),
            "/namespaces" => json(&lists::namespaces(self).await),
            "/sessions" => json(&lists::sessions(self).await),
            "/pins" => json(&lists::pins(self).await),
            "/tenants" => json(&lists::tenants(self).await),
            "/lookups" => json(&why::lookups(self, &arguments).await?),
            "/prefixes" => json(&prefixes::prefixes(self).await),
            "/links" => json(&counters::links(self)),
            "/usage" => json(&counters::usage(self)),
            "/doctor" => json(&doctor::findings(self).await?),
            "/past" => json(&past::past(self, &arguments).await?),
            "/what_if" => json(&what_if::what_if(self).await),
            "/explain" => json(&why::explain(self, body).await?),
            _ => Err(Refused::NoPath),
        }
    }
}

fn json(answer: &impl Serialize) -> Result<Vec<u8>, Refused> {
    Ok(serde_json::to_vec(answer)?)
}

/// Maximum bytes of an answer over QUIC, so that it fits into a message.
const MOST_SHOWN_BYTES: usize = MAX_PEER_MESSAGE_BYTES - 1_024;

/// Maximum bytes of a question: enough for the hashes of the longest prompt.
const MAX_BODY_BYTES: usize = 640 << 10;

//! Asks Larder's own servers.

use std::fmt::Display;
use std::io::{BufRead, BufReader};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::Body;
use ureq::config::ConfigBuilder;
use ureq::http::Response;
use ureq::typestate::AgentScope;

/// `GET http://ADDRESS PATH` as JSON.
pub(crate) fn get_json<T: DeserializeOwned>(address: &impl Display, path: &str) -> anyhow::Result<T> {
    let url = format!("http://{address}{path}");
    json(&url, read(&url, agent().get(&url).call())?)
}

/// `GET http://ADDRESS PATH` as text.
pub(crate) fn get_text(address: &impl Display, path: &str) -> anyhow::Result<String> {
    let url = format!("http://{address}{path}");
    Ok(String::from_utf8_lossy(&read(&url, agent().get(&url).call())?).into_owned())
}

/// `POST http://ADDRESS PATH` with JSON, answered in JSON.
pub(crate) fn post_json<T: DeserializeOwned>(
    address: &impl Display,
    path: &str,
    body: &impl Serialize,
) -> anyhow::Result<T> {
    let url = format!("http://{address}{path}");
    let request = agent().post(&url).content_type("application/json");
    json(&url, read(&url, request.send(serde_json::to_vec(body)?))?)
}

/// `GET http://ADDRESS PATH` as lines, for as long as the server sends them. A server that is silent for [`SILENCE`] is an error.
pub(crate) fn get_lines(
    address: &str,
    path: &str,
) -> anyhow::Result<impl Iterator<Item = std::io::Result<String>> + use<>> {
    let url = format!("http://{address}{path}");
    let agent = config().timeout_connect(Some(TIMEOUT)).timeout_recv_response(Some(TIMEOUT));
    let agent = agent.timeout_per_read(Some(SILENCE));
    let answer = accepted(&url, ureq::Agent::from(agent.build()).get(&url).call())?;
    Ok(BufReader::new(answer.into_body().into_reader()).lines())
}

fn agent() -> ureq::Agent {
    config().timeout_global(Some(TIMEOUT)).build().into()
}

/// Larder's servers are asked directly: a proxy of the environment leads out of the cluster, not into it.
fn config() -> ConfigBuilder<AgentScope> {
    ureq::Agent::config_builder().proxy(None).http_status_as_error(false)
}

fn read(url: &str, answer: Result<Response<Body>, ureq::Error>) -> anyhow::Result<Vec<u8>> {
    let mut answer = accepted(url, answer)?;
    let body = answer.body_mut().with_config().limit(MAX_BODY_BYTES);
    body.read_to_vec().with_context(|| format!("the answer from {url} is incomplete"))
}

/// An answer that is no refusal. The error has the server's reason.
fn accepted(url: &str, answer: Result<Response<Body>, ureq::Error>) -> anyhow::Result<Response<Body>> {
    let mut answer = answer.with_context(|| format!("no answer from {url}"))?;
    if answer.status().is_success() {
        return Ok(answer);
    }
    let reason = answer.body_mut().with_config().limit(MAX_REASON_BYTES).lossy_utf8(true).read_to_string();
    let reason = reason.unwrap_or_default();
    match reason.lines().next() {
        Some(reason) => bail!("{url} answers {}: {reason}", answer.status()),
        None => bail!("{url} answers {}", answer.status()),
    }
}

fn json<T: DeserializeOwned>(url: &str, body: Vec<u8>) -> anyhow::Result<T> {
    serde_json::from_slice(&body).with_context(|| not_larder(&url))
}

/// The error for a server whose answer is not understood.
pub(crate) fn not_larder(server: &impl Display) -> String {
    format!("{server} does not answer as a Larder server of this version")
}

const TIMEOUT: Duration = Duration::from_secs(5);

/// A node sends a comment at least every 10 s.
pub(crate) const SILENCE: Duration = Duration::from_secs(30);
const MAX_BODY_BYTES: u64 = 16 << 20;
const MAX_REASON_BYTES: u64 = 4 << 10;

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::TcpListener;

    use serde_json::Value;

    use super::*;

    #[test]
    fn the_reason_of_a_refusal_is_the_servers_own() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
                let head = "HTTP/1.1 400 Bad Request\r\nContent-Length: 9\r\nConnection: close\r\n\r\n";
                stream.write_all(format!("{head}too long\n").as_bytes()).unwrap();
            }
        });
        let errors = [
            get_json::<Value>(&address, "/x").err(),
            get_text(&address, "/x").err(),
            get_lines(&address.to_string(), "/x").err(),
        ];
        for error in errors {
            let expected = format!("http://{address}/x answers 400 Bad Request: too long");
            assert_eq!(format!("{:#}", error.unwrap()), expected);
        }
    }
}

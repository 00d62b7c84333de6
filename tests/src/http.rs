//! HTTP requests, as test servers read them.

use std::io::{BufRead, Read as _};

use serde_json::Value;

/// A request.
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Request {
    /// A header by its name in small letters.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The body, if it is JSON.
    pub(crate) fn json(&self) -> Option<Value> {
        serde_json::from_slice(&self.body).ok()
    }
}

/// Reads a request to its end.
///
/// # Errors
/// Fails if the client closes the connection, or does not speak HTTP.
pub(crate) fn read_request(stream: &mut impl BufRead) -> anyhow::Result<Request> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        anyhow::ensure!(stream.read_line(&mut line)? > 0, "the client closed the connection");
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let mut first = lines.first().map(String::as_str).unwrap_or_default().split(' ');
    let (Some(method), Some(path), Some("HTTP/1.1")) = (first.next(), first.next(), first.next()) else {
        anyhow::bail!("no HTTP: {lines:?}");
    };
    let (method, path) = (method.to_owned(), path.to_owned());
    let header = |line: &String| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    };
    let headers = lines[1..].iter().filter_map(header).collect();
    let mut request = Request { method, path, headers, body: Vec::new() };
    let bytes = request.header("content-length").map_or(Ok(0), str::parse)?;
    stream.take(bytes).read_to_end(&mut request.body)?;
    anyhow::ensure!(request.body.len() as u64 == bytes, "the client closed the connection");
    Ok(request)
}

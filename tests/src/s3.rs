//! A real server that speaks S3, as a process of its own: `moto_server`, which `tests/run` installs from PyPI.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::server::Killed;

/// The server, with an empty bucket `larder`. Dropping it kills it.
pub struct S3Server {
    process: Killed,
    address: String,
}

impl S3Server {
    /// Starts the server; `None` if it is not installed.
    ///
    /// # Errors
    /// Fails if the server does not come up.
    pub fn start() -> anyhow::Result<Option<Self>> {
        let installed = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools/venv/bin/moto_server");
        let program = if Path::new(installed).exists() { installed } else { "moto_server" };
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", "0"]).stdout(Stdio::null()).stderr(Stdio::piped());
        let Ok(mut process) = command.spawn() else { return Ok(None) };
        let mut lines =
            BufReader::new(process.stderr.take().context("the server's error output is not piped")?).lines();
        let said =
            |line: std::io::Result<String>| Some(line.ok()?.split_once("Running on http://")?.1.to_owned());
        let address = lines.find_map(said);
        // A thread reads its later output, so that the server never waits for a reader.
        std::thread::spawn(move || lines.for_each(drop));
        let address = address.context("the server does not say its address")?.trim().to_owned();
        let server = Self { process: Killed(process), address };
        server.make_bucket()?;
        Ok(Some(server))
    }

    /// The address on which the server listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The part of a node's configuration that names a bucket of this server.
    pub fn config(&self, bucket: &str) -> String {
        format!(
            "[object]\nurl = \"s3://{bucket}/some/prefix\"\nendpoint = \"http://{}\"\nallow_http = true\n\
             find_deadline_ms = 5000\nsettings = {{ region = \"us-east-1\", access_key_id = \"id\", \
             secret_access_key = \"confidential\" }}\n",
            self.address
        )
    }

    /// Ends the server.
    ///
    /// # Errors
    /// Fails if the server cannot be signalled.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.process.kill()
    }

    fn make_bucket(&self) -> anyhow::Result<()> {
        let mut stream = TcpStream::connect(&self.address)?;
        let authorization = "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request, \
             SignedHeaders=host, Signature=0";
        let host = &self.address;
        write!(
            stream,
            "PUT /larder HTTP/1.1\r\nHost: {host}\r\nAuthorization: {authorization}\r\n\
             Content-Length: 0\r\nConnection: close\r\n\r\n"
        )?;
        let mut said = String::new();
        stream.read_to_string(&mut said)?;
        ensure!(said.starts_with("HTTP/1.1 200"), "no bucket was made: {said}");
        Ok(())
    }
}

//! A collector of traces: it decodes what an OTLP exporter sends, by the official protobuf.

use std::collections::BTreeMap;
use std::io::{BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message as _;

use crate::http::read_request;
use crate::wait;

/// A collector on a free port. Its threads live as long as the test.
pub struct Collector {
    address: SocketAddr,
    spans: Arc<Mutex<Vec<SpanSeen>>>,
}

/// One span, with its process's attributes.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanSeen {
    /// `service.name` of its process.
    pub service: String,
    /// `service.instance.id` of its process.
    pub instance: String,
    /// The trace's id, in hexadecimal digits.
    pub trace_id: String,
    /// The span's own id.
    pub id: String,
    /// The id of the span that caused it; empty if there is none.
    pub parent: String,
    /// The span's name.
    pub name: String,
    /// The side of a call.
    pub kind: SpanKind,
    /// Its begin and end, in nanoseconds since 1970.
    pub time: (u64, u64),
    /// The span's attributes.
    pub attributes: BTreeMap<String, String>,
}

impl Collector {
    /// Starts a collector.
    ///
    /// # Errors
    /// Fails if there is no port.
    pub fn start() -> anyhow::Result<Self> {
        let (listener, spans) = (TcpListener::bind("127.0.0.1:0")?, Arc::<Mutex<Vec<SpanSeen>>>::default());
        let (address, seen) = (listener.local_addr()?, Arc::clone(&spans));
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let seen = Arc::clone(&seen);
                // An error: the exporter went away.
                thread::spawn(move || _ = serve(stream, &seen));
            }
        });
        Ok(Self { address, spans })
    }

    /// The collector's address for exporters.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The spans so far.
    pub fn spans(&self) -> Vec<SpanSeen> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until all spans together satisfy a condition, and returns them.
    ///
    /// # Panics
    /// Panics if the condition does not come true; `what` names the awaited spans in the error.
    pub fn until(&self, what: &str, are_there: impl Fn(&[SpanSeen]) -> bool) -> Vec<SpanSeen> {
        wait::until(what, || Some(self.spans()).filter(|spans| are_there(spans)))
    }
}

fn serve(stream: TcpStream, seen: &Mutex<Vec<SpanSeen>>) -> anyhow::Result<()> {
    let mut answers = stream.try_clone()?;
    let mut requests = BufReader::new(stream);
    loop {
        let request = read_request(&mut requests)?;
        let is_of_spans = request.method == "POST" && request.path == "/v1/traces";
        anyhow::ensure!(is_of_spans, "not for spans: {} {}", request.method, request.path);
        let kind = request.header("content-type");
        anyhow::ensure!(kind == Some("application/x-protobuf"), "{kind:?}");
        let request = ExportTraceServiceRequest::decode(request.body.as_slice())?;
        seen.lock().unwrap_or_else(PoisonError::into_inner).extend(spans_of(request));
        let answer = ExportTraceServiceResponse { partial_success: None }.encode_to_vec();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: ";
        answers.write_all(format!("{head}{}\r\n\r\n", answer.len()).as_bytes())?;
        answers.write_all(&answer)?;
    }
}

fn spans_of(request: ExportTraceServiceRequest) -> Vec<SpanSeen> {
    let mut seen = Vec::new();
    for of_process in request.resource_spans {
        let process = attributes(of_process.resource.unwrap_or_default().attributes);
        let of_process_says = |key: &str| process.get(key).cloned().unwrap_or_default();
        for span in of_process.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            seen.push(SpanSeen {
                service: of_process_says("service.name"),
                instance: of_process_says("service.instance.id"),
                trace_id: hex(&span.trace_id),
                id: hex(&span.span_id),
                parent: hex(&span.parent_span_id),
                kind: span.kind(),
                name: span.name,
                time: (span.start_time_unix_nano, span.end_time_unix_nano),
                attributes: attributes(span.attributes),
            });
        }
    }
    seen
}

fn attributes(pairs: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |value: Option<AnyValue>| match value.and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        Some(other) => format!("{other:?}"),
        None => String::new(),
    };
    pairs.into_iter().map(|pair| (pair.key, text(pair.value))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

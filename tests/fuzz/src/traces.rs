//! Traces and lookup logs; users may get these files from anywhere.

use larder_cli::trace::{CHUNK_TOKENS, History, Request, TraceReader};

/// Tests the readers of traces and of logs.
///
/// - Requests of a trace that are written again are read as the same requests.
/// - A request has as many blocks as its tokens fill, and no more of it is kept than the file has.
/// - A trace is a history whose requests are in the order of their times; a history has no more requests than the file has lines.
///
/// Returns whether the bytes are a trace or a log.
///
/// # Panics
/// Panics if a property does not hold.
pub fn trace_files(bytes: &[u8]) -> bool {
    let trace = TraceReader::new(bytes).read_all(None);
    let mut history = History::new(None, None);
    let history = history.read(bytes, usize::MAX).and_then(|()| history.finish());
    if let Ok(requests) = &trace {
        let again = TraceReader::new(written(requests).as_bytes()).read_all(None);
        assert_eq!(again.ok().as_ref(), Some(requests));
        for request in requests {
            assert_eq!(request.block_ids.len() as u64, request.input_tokens.div_ceil(CHUNK_TOKENS));
            assert!(request.full_chunks().len() <= request.block_ids.len());
            assert!(request.usable_chunks() <= request.full_chunks().len());
        }
    }
    if let Ok(history) = &history {
        let lines = bytes.split(|&byte| byte == b'\n').count();
        assert!((1..=lines).contains(&history.requests().len()));
        let ids: usize = history.requests().iter().map(|request| request.block_ids.len()).sum();
        assert!(ids <= bytes.len(), "an id has a digit at least");
        if let Ok(requests) = &trace
            && !history.is_log()
        {
            let mut sorted = requests.clone();
            sorted.sort_by_key(|request| request.timestamp_ms);
            assert_eq!(history.requests(), sorted);
        }
    }
    trace.is_ok() || history.is_ok()
}

fn written(requests: &[Request]) -> String {
    let line = |request: &Request| {
        let Request { timestamp_ms, input_tokens, output_tokens, block_ids } = request;
        serde_json::json!({
            "timestamp": timestamp_ms,
            "input_length": input_tokens,
            "output_length": output_tokens,
            "hash_ids": block_ids,
        })
        .to_string()
            + "\n"
    };
    requests.iter().map(line).collect()
}

/// A trace that the generator made, and a log.
pub(crate) fn examples() -> Vec<Vec<u8>> {
    let generated: Vec<Request> = larder_cli::generator::Generator::new(1).take(8).collect();
    let small = Request { timestamp_ms: 5, input_tokens: 1_025, output_tokens: 7, block_ids: vec![1, 2, 3] };
    let log = |at: u64, namespace: &str, ids: &[u64]| {
        serde_json::json!({
            "timestamp": at,
            "input_length": 40,
            "output_length": 0,
            "chunk_tokens": 16,
            "namespace": namespace,
            "hash_ids": ids,
        })
        .to_string()
            + "\n"
    };
    let log = [log(5, "a", &[7, 8]), log(90_000, "b", &[7]), log(10, "a", &[])].concat();
    vec![written(&[small]).into(), written(&generated).into(), log.into()]
}

use std::{net::TcpListener, thread};

use control_proto::token::UNSUPPORTED_OPERATION;
use indexmap::IndexMap;
use transport_core::{
    Dtype, FeatureDescriptor, FeatureName, Generation, RemoteAddr, SampleKey, StoreId, TensorMeta,
};

use super::*;

#[derive(Clone, Copy, PartialEq)]
enum Server {
    Batches,
    SinglesOnly,
    /// Drops the first connection after it has applied the request.
    LosesFirstAnswer,
    /// Closes after each answer, as the documented server does.
    OneRequestAConnection,
    /// Knows generation 2 of `run:task-1`.
    Newer,
}

/// Serves until the test ends; gives its address, and what it has released with batch sizes.
fn serve(server: Server) -> (SessionName, Arc<Mutex<Vec<usize>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let seen = sizes.clone();
    thread::spawn(move || {
        let mut first = true;
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).unwrap() > 0 {
                line.pop();
                let reply = answer(server, &line, &seen);
                line.clear();
                if server == Server::LosesFirstAnswer && std::mem::take(&mut first) {
                    break;
                }
                let mut out = Vec::new();
                reply.write(&mut out);
                stream.write_all(&out).unwrap();
                if server == Server::OneRequestAConnection {
                    break;
                }
            }
        }
    });
    (address.to_string().parse().unwrap(), sizes)
}

fn answer(server: Server, line: &[u8], seen: &Mutex<Vec<usize>>) -> Reply {
    let refused = |error: &str| Reply::Refused { error: error.into() };
    let (token, items) = match Request::parse(line).unwrap() {
        Request::Health => return Reply::Health(Box::default()),
        Request::One { token, item, .. } => (token, vec![item]),
        Request::Batch { .. } if server == Server::SinglesOnly => {
            return refused(UNSUPPORTED_OPERATION);
        }
        Request::Batch { token, items, .. } => (token, items),
    };
    if token.expose() != "hush" {
        return refused("invalid control token");
    }
    let stale = |item: &Item| server == Server::Newer && item.sample_id.as_str() == "run:task-1";
    if items.iter().any(stale) {
        return refused("stale release");
    }
    seen.lock().push(items.len());
    Reply::Freed { freed_bytes: 10 * items.len() as u64, released_samples: items.len() as u64 }
}

fn samples(control: &SessionName, token: &str, count: usize) -> Vec<Arc<Descriptor>> {
    let sample = |i| {
        let id = SampleId::new(format!("run:task-{i}")).unwrap();
        let key = SampleKey::new(StoreId::new("run").unwrap(), id, Generation(1));
        let meta = TensorMeta::new(Dtype::Uint8, [10]).unwrap();
        let feature = FeatureDescriptor::new(meta, Some(RemoteAddr(512)), None);
        let features = IndexMap::from([(FeatureName::new("x").unwrap(), feature)]);
        let place = TokenLocation::new("rdma", control.clone(), control.clone(), token);
        Arc::new(Descriptor::new(key, features, None, Location::Token(place)).unwrap())
    };
    (0..count).map(sample).collect()
}

fn releaser() -> TokenReleaser {
    let (timeout, pause) = (Duration::from_secs(2), Duration::from_millis(5));
    TokenReleaser::new(TokenOptions { timeout, pause, ..TokenOptions::default() })
}

#[test]
fn batches_are_bounded_and_servers_are_asked_side_by_side() {
    let (a, sizes) = serve(Server::Batches);
    let (b, others) = serve(Server::OneRequestAConnection);
    let mut all = samples(&a, "hush", 5000);
    all.extend(samples(&b, "hush", 3));
    let releaser = releaser();
    let report = releaser.release(&all, Verb::Release).unwrap();
    assert_eq!((report.released, report.freed_bytes, report.failed.len()), (5003, 50_030, 0));
    assert_eq!((&*sizes.lock(), &*others.lock()), (&vec![4096, 904], &vec![3]));
    assert_eq!(releaser.counts(), (3, 5003, 0));
    releaser.health(&a).unwrap();
}

#[test]
fn a_server_without_batches_is_asked_one_by_one_from_then_on() {
    let (control, sizes) = serve(Server::SinglesOnly);
    let releaser = releaser();
    let all = samples(&control, "hush", 5);
    assert_eq!(releaser.release(&all, Verb::Release).unwrap().released, 5);
    assert_eq!(releaser.release(&all, Verb::Abort).unwrap().released, 5);
    assert_eq!(*sizes.lock(), vec![1; 10]);
    assert_eq!(releaser.counts().2, 1, "asked once whether it knows batches");
}

#[test]
fn a_lost_answer_is_asked_for_again() {
    let (control, sizes) = serve(Server::LosesFirstAnswer);
    let report = releaser().release(&samples(&control, "hush", 4), Verb::Release).unwrap();
    assert_eq!((report.released, report.failed.len()), (4, 0));
    assert_eq!(*sizes.lock(), [4, 4], "applied twice, which is harmless");
}

#[test]
fn one_stale_sample_does_not_keep_the_others() {
    let (control, _) = serve(Server::Newer);
    let report = releaser().release(&samples(&control, "hush", 4), Verb::Release).unwrap();
    assert_eq!(report.released, 3);
    let (_, ids, error) = &report.failed[0];
    assert_eq!((ids.len(), ids[0].as_str()), (1, "run:task-1"));
    assert_eq!(error.kind(), ErrorKind::Stale);
}

#[test]
fn what_cannot_be_reached_or_is_refused_is_reported_with_its_server_and_no_secret() {
    let (good, _) = serve(Server::Batches);
    let gone = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().to_string().parse::<SessionName>().unwrap()
    };
    let mut all = samples(&gone, "hush", 2);
    all.extend(samples(&good, "hush", 2));
    all.extend(samples(&good, "other-secret", 1));
    let start = Instant::now();
    let report = releaser().release(&all, Verb::Release).unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!((report.released, report.failed.len()), (2, 2));
    for (control, ids, error) in &report.failed {
        let text = format!("{error} {error:?}");
        assert!(!text.contains("hush") && !text.contains("other-secret"), "{text}");
        assert_eq!(error.context("server"), Some(&*control.to_string()));
        let gone = *control == gone;
        assert_eq!(ids.len(), if gone { 2 } else { 1 });
        let kind = if gone { ErrorKind::PeerGone } else { ErrorKind::PermissionDenied };
        assert_eq!(error.kind(), kind, "{error}");
    }
}

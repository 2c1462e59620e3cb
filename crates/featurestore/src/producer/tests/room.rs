//! Arenas that have room, but not in one piece.

use control_proto::capture::PATIENCE_HEADER;
use transport_core::Release;

use super::*;

const QUEUED: Does = Does::Refuses(FailureCause::Queued);
const FAILED: Does = Does::Refuses(FailureCause::Other);
const FULL: Does = Does::Refuses(FailureCause::NoRoom);

/// Says of each sample that it failed, for this or for want of room.
pub(super) fn refuse(
    request: &CaptureRequest,
    cause: Option<FailureCause>,
) -> (StatusCode, Vec<u8>) {
    let says = match cause {
        Some(FailureCause::Queued) => "others came before",
        Some(FailureCause::Other) => "cached prefix",
        _ => "no room in one piece",
    };
    let row = |prompt| {
        let mut row = failed_row(prompt, says);
        let CaptureOutcome::Failed { cause: of_row, .. } = &mut row.outcome else {
            unreachable!("it failed");
        };
        *of_row = cause;
        row
    };
    let rows: Vec<Row> = request.prompts.iter().map(row).collect();
    let mut out = Vec::new();
    write_response(&mut out, request.form, request.batched, &rows).unwrap();
    (StatusCode::OK, out)
}

impl Server {
    /// Waits until it holds nothing, for as long as the request has patience.
    pub(super) async fn empty_within(&self, headers: &HeaderMap) -> bool {
        let patience = headers
            .get(PATIENCE_HEADER)
            .map_or(30_000, |value| value.to_str().unwrap().parse::<u64>().unwrap());
        let end = Instant::now() + Duration::from_millis(patience);
        while Instant::now() < end {
            if self.resident().await == 0 {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        false
    }

    async fn free(&self, refs: impl Iterator<Item = SampleRef>) {
        let release = |it: SampleRef| Release::from(Arc::new(it.descriptor().unwrap()));
        self.publisher.client().release(refs.map(release).collect()).await.unwrap();
    }
}

/// A large sample has no room beside the window that is begun, and only that window, once it is
/// whole, gives room back: smaller ones make it whole.
#[tokio::test(flavor = "multi_thread")]
async fn a_sample_without_room_lets_others_finish_the_window() {
    let (server, url) = Server::start(&[], Does::InPieces(10)).await;
    for (overlap, ordered) in [(true, false), (false, false)] {
        let Client { samples, client, .. } = client(&server, &url);
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(&[&url]);
        (options.overlap, options.ordered, options.lease, options.concurrency) =
            (overlap, ordered, 1, 1);
        let producer =
            Producer::new(options, client, samples.clone(), folder.path(), marks()).unwrap();
        let mut list = List::new(13);
        (list.0[2].input_ids, list.0[2].loss_mask) = (vec![7; 20], vec![1; 20]);
        let start = Instant::now();
        let running = tokio::spawn(producer.run(list));
        let mut reader = RefReader::open(folder.path()).unwrap();
        let (mut window, mut settled) = (Vec::new(), 0);
        while let Ok(polled) = reader.poll(100) {
            window.extend(polled.refs);
            // Whole windows, and what is left at the end.
            let whole = if polled.ended { window.len() } else { window.len() / 4 * 4 };
            server.free(window.drain(..whole)).await;
            settled += whole as u64;
            reader.settle(settled).unwrap();
            if polled.ended {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let produced = running.await.unwrap().unwrap();
        assert_eq!((produced.published, produced.retries), (13, 0), "not one attempt failed");
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }
}

/// A client whose requests never wait, and which can tell by nothing but the server's word what was in
/// the way.
fn impatient(server: &Server, url: &str) -> Client {
    let Client { samples, endpoints, .. } = client(server, url);
    let mut options = CaptureOptions::new(StoreId::new("run").unwrap(), layout());
    options.patience = Some(Duration::ZERO);
    let client = CaptureClient::new(options, samples.clone(), endpoints.clone());
    Client { samples, endpoints, client }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_others_are_before_is_told_from_one_without_room() {
    for (does, kind, says, not) in [
        (QUEUED, PUT_OFF, "the servers put a prompt off", "room"),
        (Does::Busy, PUT_OFF, "the servers put a prompt off", "room"),
        (FULL, NO_ROOM, "no server had room", "put off"),
        (FAILED, ErrorKind::Unexpected, "a prompt cannot be captured", "room"),
    ] {
        let (server, url) = Server::start(&[], does).await;
        let Client { samples, client, .. } = impatient(&server, &url);
        let (_, outcome) = client.capture(&url, tasks(1)).await.prompts.remove(0);
        let error = outcome.unwrap_err();
        assert_eq!((error.kind(), error.is_temporary()), (kind, true), "{does:?}: {error}");
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(&[&url]);
        (options.room_timeout, options.attempts) = (Duration::ZERO, 1);
        let producer = Producer::new(options, client, samples, folder.path(), marks()).unwrap();
        let error = producer.run(List::new(1)).await.unwrap_err();
        assert!(!error.is_temporary() && (error.kind() == kind || does == FAILED), "{error}");
        let error = error.to_string();
        assert!(error.contains(says) && !error.contains(not), "{does:?}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_server_is_asked_again_and_never_dropped() {
    let (server, url) = Server::start(&[Does::Busy; 3], Does::Good).await;
    let Client { samples, client, .. } = client(&server, &url);
    let folder = tempfile::tempdir().unwrap();
    let producer =
        Producer::new(options(&[&url]), client, samples, folder.path(), marks()).unwrap();
    let running = tokio::spawn(producer.run(List::new(4)));
    settle_all(folder.path(), usize::MAX).await;
    let produced = running.await.unwrap().unwrap();
    assert_eq!((produced.published, produced.servers_dropped), (4, 0));
}

/// Being put off is no failed attempt of the prompt, however often it happens.
#[tokio::test(flavor = "multi_thread")]
async fn prompts_that_are_put_off_come_later_and_have_all_their_attempts() {
    let off = [QUEUED, Does::Busy, QUEUED, Does::Busy, QUEUED, Does::Busy];
    let (server, url) = Server::start(&off, Does::Good).await;
    let Client { samples, client, .. } = impatient(&server, &url);
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&[&url]);
    options.attempts = 1;
    let producer = Producer::new(options, client, samples, folder.path(), marks()).unwrap();
    let running = tokio::spawn(producer.run(List::new(4)));
    settle_all(folder.path(), usize::MAX).await;
    let produced = running.await.unwrap().unwrap();
    assert_eq!((produced.published, produced.retries, produced.servers_dropped), (4, 0, 0));
}

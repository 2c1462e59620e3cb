//! Arenas that have room, but not in one piece.

use control_proto::capture::PATIENCE_HEADER;
use transport_core::Release;

use super::*;

/// Says of each sample that there is no room.
pub(super) fn refuse(request: &CaptureRequest) -> (StatusCode, Vec<u8>) {
    let row = |prompt| failed_row(prompt, "no room in one piece");
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

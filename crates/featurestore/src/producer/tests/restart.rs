//! A producer that is started again while its consumers have lost something.

use super::*;

/// Prompts that come late.
struct Late(Box<List>);

impl Prompts for Late {
    fn next(&mut self) -> Result<Option<Task>> {
        std::thread::sleep(Duration::from_millis(100));
        self.0.next()
    }
    fn again(&mut self, id: &SampleId) -> Result<Option<Task>> {
        self.0.again(id)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_sample_is_captured_once_although_its_prompt_comes_by_anew() {
    let (server, url) = Server::start(&[], Does::Good).await;
    let folder = tempfile::tempdir().unwrap();
    {
        // An earlier life published it, and its server lost it.
        let Client { samples, client, .. } = client(&server, &url);
        let answer = client.capture(&url, tasks(1)).await;
        let first = answer.prompts[0].1.as_ref().unwrap();
        let mut writer = RefWriter::open(folder.path()).unwrap();
        writer.publish(&[first.announce("run", Strategy::Dspark).unwrap()]).unwrap();
        let id = first.descriptor.sample.sample_id.clone();
        samples.abort(&id).await;
        RefReader::open(folder.path()).unwrap().lost([&id]).unwrap();
    }
    assert_eq!(server.resident().await, 0);
    let Client { samples, client, .. } = client(&server, &url);
    let producer =
        Producer::new(options(&[&url]), client, samples, folder.path(), marks()).unwrap();
    let running = tokio::spawn(producer.run(Box::new(Late(List::new(3)))));
    let ids = settle_all(folder.path(), usize::MAX).await;
    let produced = running.await.unwrap().unwrap();
    assert_eq!((produced.recaptured, produced.skipped, produced.published), (1, 1, 3));
    assert_eq!((ids.len(), server.resident().await), (4, 3), "{ids:?}");
}

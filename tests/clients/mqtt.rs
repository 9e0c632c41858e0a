//! Talks to examples/mqtt by rumqttc, in both versions: client PORT.

use std::time::Duration;

use rumqttc::{MqttOptions, QoS, v5};

const MESSAGES: usize = 500;

fn version_three(port: u16) {
    let mut options = MqttOptions::new("rumqttc-3", "127.0.0.1", port);
    options.set_keep_alive(Duration::from_secs(30)).set_max_packet_size(300_000, 300_000);
    let (client, mut connection) = rumqttc::Client::new(options, MESSAGES);
    client.subscribe("three/#", QoS::AtLeastOnce).unwrap();
    let (mut heard, mut acknowledged, mut granted) = (0, 0, false);
    for event in connection.iter() {
        match event.expect("the connection holds") {
            rumqttc::Event::Incoming(rumqttc::Packet::SubAck(suback)) => {
                granted = suback.return_codes == [rumqttc::SubscribeReasonCode::Success(QoS::AtLeastOnce)];
                for n in 0..MESSAGES {
                    client.try_publish("three/t", QoS::AtLeastOnce, false, n.to_string()).unwrap();
                }
            }
            rumqttc::Event::Incoming(rumqttc::Packet::PubAck(_)) => acknowledged += 1,
            rumqttc::Event::Incoming(rumqttc::Packet::Publish(publish)) => {
                assert_eq!(publish.payload, heard.to_string().as_bytes());
                heard += 1;
            }
            _ => {}
        }
        if heard == MESSAGES && acknowledged == MESSAGES {
            break;
        }
    }
    assert!(granted);
    println!("rumqttc, version 3.1.1: as expected");
}

fn version_five(port: u16) {
    let mut options = v5::MqttOptions::new("rumqttc-5", "127.0.0.1", port);
    options.set_keep_alive(Duration::from_secs(30));
    let (client, mut connection) = v5::Client::new(options, MESSAGES);
    client.subscribe("five/+", v5::mqttbytes::QoS::AtLeastOnce).unwrap();
    let (mut heard, mut acknowledged) = (0, 0);
    for event in connection.iter() {
        match event.expect("the connection holds") {
            v5::Event::Incoming(v5::Incoming::SubAck(_)) => {
                for n in 0..MESSAGES {
                    client.try_publish("five/t", v5::mqttbytes::QoS::AtLeastOnce, false, n.to_string()).unwrap();
                }
            }
            v5::Event::Incoming(v5::Incoming::PubAck(_)) => acknowledged += 1,
            v5::Event::Incoming(v5::Incoming::Publish(publish)) => {
                assert_eq!(publish.payload, heard.to_string().as_bytes());
                heard += 1;
            }
            _ => {}
        }
        if heard == MESSAGES && acknowledged == MESSAGES {
            break;
        }
    }
    println!("rumqttc, version 5: as expected");
}

fn main() {
    let port = std::env::args().nth(1).and_then(|port| port.parse().ok()).expect("client PORT");
    version_three(port);
    version_five(port);
}

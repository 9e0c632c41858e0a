import java.io.BufferedReader;
import java.io.FileInputStream;
import java.io.InputStreamReader;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.time.Duration;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLParameters;
import javax.net.ssl.SSLSocket;
import javax.net.ssl.TrustManagerFactory;

/**
 * Asks examples/tls_echo who it sees, and once more with the session of before: PORT AUTHORITY VERSION. With a fourth argument, h1 or
 * h2, gets the page of examples/https instead.
 */
class Tls {
    public static void main(String[] args) throws Exception {
        KeyStore believed = KeyStore.getInstance(KeyStore.getDefaultType());
        believed.load(null, null);
        believed.setCertificateEntry(
                "authority", CertificateFactory.getInstance("X.509").generateCertificate(new FileInputStream(args[1])));
        TrustManagerFactory trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        trust.init(believed);
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(null, trust.getTrustManagers(), null);
        if (args.length > 3) {
            SSLParameters parameters = new SSLParameters();
            parameters.setProtocols(new String[] {"TLSv" + args[2]});
            HttpClient client =
                    HttpClient.newBuilder()
                            .sslContext(context)
                            .sslParameters(parameters)
                            .version(args[3].equals("h2") ? HttpClient.Version.HTTP_2 : HttpClient.Version.HTTP_1_1)
                            .build();
            HttpRequest request =
                    HttpRequest.newBuilder(URI.create("https://localhost:" + args[0] + "/"))
                            .timeout(Duration.ofSeconds(20))
                            .build();
            System.out.print(client.send(request, HttpResponse.BodyHandlers.ofString()).body());
            return;
        }
        for (int round = 0; round < 2; round++) {
            // By its name, since sessions are kept by that.
            try (SSLSocket socket =
                    (SSLSocket) context.getSocketFactory().createSocket("localhost", Integer.parseInt(args[0]))) {
                SSLParameters parameters = socket.getSSLParameters();
                parameters.setProtocols(new String[] {"TLSv" + args[2]});
                parameters.setEndpointIdentificationAlgorithm("HTTPS");
                socket.setSSLParameters(parameters);
                socket.setSoTimeout(20000);
                socket.getOutputStream().write("who\n".getBytes());
                System.out.println(new BufferedReader(new InputStreamReader(socket.getInputStream())).readLine());
            }
        }
    }
}

import java.io.ByteArrayOutputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.zip.GZIPOutputStream;

/** The JDK's own HTTP client with its defaults, which ask for an upgrade to HTTP/2 with every request in the clear. */
class Client {
    static final String CHAT = "{\"model\":\"precise\",\"temperature\":0,\"max_tokens\":8,\"stream\":%s,"
        + "\"messages\":[{\"role\":\"user\",\"content\":\"What is the capital of France?\"}]}";

    public static void main(String[] arguments) throws Exception {
        var client = HttpClient.newHttpClient();
        var uri = URI.create(arguments[0] + "/v1/chat/completions");
        for (var stream : new boolean[] {false, true}) {
            var body = BodyPublishers.ofString(CHAT.formatted(stream));
            var answer = client.send(HttpRequest.newBuilder(uri).POST(body).build(), BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.body());
        }
        var packed = new ByteArrayOutputStream();
        try (var gzip = new GZIPOutputStream(packed)) {
            gzip.write(CHAT.formatted(false).getBytes());
        }
        var body = BodyPublishers.ofByteArray(packed.toByteArray());
        var request = HttpRequest.newBuilder(uri).header("content-encoding", "gzip").POST(body).build();
        System.out.println(client.send(request, BodyHandlers.ofString()).body());
    }
}
